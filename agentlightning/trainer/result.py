"""What a run left behind."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentlightning.arguments import nearest
from agentlightning.metrics.svg import curve_svg, points_of
from agentlightning.types.html import fields_html

logger = logging.getLogger(__name__)


_HAS = (
    "It has run_dir, checkpoint, stopped, learned and metrics, a row per step: result.metrics[-1]['reward']. The model "
    "is at result.checkpoint: agl serve, agl export."
)


class MetricRow(dict[str, Any]):
    """A step's metrics, which says what they are called where one is asked for by another name."""

    def __missing__(self, name: str) -> Any:
        meant = nearest(name, self)
        hint = f"Did you mean {meant}?" if meant else f"The row has {', '.join(self)}."
        raise KeyError(f"{name}. {hint}")


class MetricRows(list[Mapping[str, Any]]):
    """The rows of a run's metrics, of which a column is asked for in words that Python's own list does not have."""

    if not TYPE_CHECKING:

        def __getitem__(self, which: Any) -> Any:
            if isinstance(which, str):
                raise TypeError(
                    f"metrics is a list with a row per step. The last one's: result.metrics[-1][{which!r}]; of all: "
                    f"[row.get({which!r}) for row in result.metrics]."
                )
            return super().__getitem__(which)


@dataclass(frozen=True, slots=True)
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
        object.__setattr__(self, "metrics", MetricRows(map(MetricRow, self.metrics)))

    def __await__(self) -> Generator[None, None, RunResult]:
        """`await trainer.fit(…)` gives the result too: `fit` has come to its end by then."""
        logger.warning("fit() had come to its end before this await. In an event loop: await trainer.fit_async(…)")
        return self
        yield

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"RunResult has no {name!r}. {_HAS}", name=name, obj=self)

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
