"""What a run left behind."""

from __future__ import annotations

import logging
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentlightning.metrics.sink import MetricRow
from agentlightning.metrics.svg import curve_svg, points_of
from agentlightning.types.html import fields_html

logger = logging.getLogger(__name__)


_HAS = (
    "It has run_dir, checkpoint, stopped, learned and metrics, a row per step: result.metrics[-1]['reward']. The model "
    "is at result.checkpoint: agl serve, agl export."
)
_ROWS = (
    "result.metrics is a list with a row per step, each a dict. The last one's: result.metrics[-1][{name!r}]; of all: "
    "[row.get({name!r}) for row in result.metrics]."
)
_SOUGHT = {
    r"(all_|train_)?(rows|history|logs?|log_history|records|data|results|steps|curve|summary|stats)": _ROWS,
    r"(final_|last_|mean_|avg_|total_)?(reward|loss|val_reward|accuracy|score)s?": _ROWS,
    r"best(_\w+)?": "The row that validated best: max((row for row in result.metrics if 'val_reward' in row), "
    "key=lambda row: row['val_reward']). The steps' models that were kept: {run}/checkpoints.",
    r"(trained_|final_)?(model|policy|weights|tokenizer|lora|adapter)(_path|_dir)?|generate|predict|chat|checkpoints": (
        "The trained model is in a folder, {model}: load it with transformers' from_pretrained, or serve it, "
        "agl serve {run}."
    ),
    r"(save|push|export)(_\w+)?": "Everything is saved by now, in {run}. A copy of the model: agl export {run} --to "
    "FOLDER; to the Hugging Face Hub: agl export {run} --push NAME.",
    r"plot\w*|figure|draw": "{run}/curve.png is the plot; the numbers are in result.metrics.",
    r"rollouts?|trajector\w+|traces?|spans|messages|conversations|samples|completions|outputs?|episodes": (
        "agl show {run} prints what was said, and agl export {run} --jsonl FILE writes it."
    ),
    r"(to|as)_?(dict|json|pandas|df|dataframe|csv)|json|dict|model_dump\w*|df": "As a table: "
    "pandas.DataFrame(result.metrics). The same rows as JSON, a line each: {run}/metrics.jsonl.",
    r"(run_|output_|log_|save_)?(dir|folder|path|name|id)|logdir|output": "The run's folder: result.run_dir, {run}.",
}
"""What else people look for in a result, and where it is."""


class MetricRows(list[Mapping[str, Any]]):
    """The rows of a run's metrics, of which a column is asked for in words that Python's own list does not have."""

    if not TYPE_CHECKING:

        def __getitem__(self, which: Any) -> Any:
            if isinstance(which, str):
                raise TypeError(_ROWS.format(name=which))
            return super().__getitem__(which)

        def __getattr__(self, name: str) -> Any:
            hint = _place_of(name, Path("RUN"), self) or _ROWS.format(name="reward")
            raise AttributeError(f"The list of metrics has no {name!r}. {hint}", name=name, obj=self)


def _place_of(name: str, run: Path, metrics: Iterable[Mapping[str, Any]], model: Path | None = None) -> str | None:
    """Where in a result is what somebody looks for by this name."""
    measured = any(name in row for row in metrics)
    hint = next((hint for names, hint in _SOUGHT.items() if re.fullmatch(names, name, re.IGNORECASE)), None)
    hint = hint or (_ROWS if measured else None)
    return hint and hint.format(name=name if measured else "reward", run=run, model=model or run / "checkpoints")


@dataclass(frozen=True)
class RunResult:
    """What a run left behind."""

    run_dir: Path
    """The run's folder, with everything that it wrote."""
    checkpoint: Path | None
    """The last checkpoint; None if none was written."""
    stopped: bool
    """The user stopped it before its end."""
    metrics: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    """A row per step, as in `metrics.jsonl`: `step`, `reward`, `val_reward`, …"""

    def __post_init__(self) -> None:
        rows, names = list(map(MetricRow, self.metrics)), frozenset[str]().union(*self.metrics)
        for row in rows:
            row.of_others = names
        object.__setattr__(self, "metrics", MetricRows(rows))

    def __await__(self) -> Generator[None, None, RunResult]:
        """`await trainer.fit(…)` gives the result too: `fit` has come to its end by then."""
        logger.warning("fit() had come to its end before this await. In an event loop: await trainer.fit_async(…)")
        return self
        yield

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"RunResult has no {name!r}.", name=name, obj=self)
            model = self.checkpoint and self.checkpoint / "model"
            hint = _place_of(name, self.run_dir, self.metrics, model) or _HAS
            raise AttributeError(f"RunResult has no {name!r}. {hint}", name=name, obj=self)

        def __iter__(self) -> Any:
            raise TypeError(f"RunResult is one object, no list of rows or pair. {_HAS}")

        def __getitem__(self, name: Any) -> Any:
            raise TypeError(f"RunResult is no dict or list: it has no [{name!r}]. {_HAS}")

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        curves = {"training": points_of(self.metrics, "reward"), "validation": points_of(self.metrics, "val_reward")}
        about = {"run": str(self.run_dir), "checkpoint": self.checkpoint and str(self.checkpoint)}
        return curve_svg(curves, "reward") + fields_html("", about | ({"stopped": "yes"} if self.stopped else {}))

    @property
    def learned(self) -> bool:
        """Whether any step changed the weights. A run without steps has nothing to answer for."""
        updates = [value for m in self.metrics for name, value in m.items() if name.split("/")[-1] == "updates"]
        return not updates or any(updates)
