"""What a job's folder shows of the job, as its run wrote it: metrics by step as events and as a table, checkpoints, and
what graders did in the training (their time, what went wrong, and the tokens of models that they asked).
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from agentlightning.algorithm.checkpoint import CHECKPOINT_FILE, list_checkpoints
from agentlightning.algorithm.episode import Sampled
from agentlightning.algorithm.part import Part, RunHooks, RunScope
from agentlightning.finetuning.graders.agent import GRADE, TOTAL
from agentlightning.finetuning.records import JobEvent
from agentlightning.metrics.sink import METRICS_FILE, metrics_row, read_metrics
from agentlightning.store.base import LightningStore

_TAIL_BYTES = 1 << 18
_OF_PARTS = "reward/"
"""The prefix of a run's metrics of the rewards that have names, those of graders."""
_OF_EXAMPLES: Mapping[str, str] = {
    "loss": "train_loss",
    "valid_loss": "valid_loss",
    "full_valid_loss": "full_valid_loss",
}
_OF_CHATS: Mapping[str, str] = {
    **_OF_EXAMPLES,
    "token_accuracy": "train_mean_token_accuracy",
    "valid_token_accuracy": "valid_mean_token_accuracy",
    "full_valid_token_accuracy": "full_valid_mean_token_accuracy",
}
_OF_ROLLOUTS: Mapping[str, str] = {
    "reward": "train_mean_reward",
    "val_reward": "full_valid_mean_reward",
    "response_tokens_mean": "completion_tokens_mean",
}
"""Our names of what a step measures, and those of the API."""
_WORDS: Mapping[str, str] = {
    "train_loss": "training loss",
    "valid_loss": "validation loss",
    "full_valid_loss": "full validation loss",
    "train_mean_reward": "train mean reward",
    "full_valid_mean_reward": "full validation mean reward",
}
_NAMES: Mapping[str, Mapping[str, str]] = {
    "supervised": _OF_CHATS,
    "dpo": _OF_EXAMPLES,
    "reinforcement": _OF_ROLLOUTS,
}
_MORE: Mapping[str, Sequence[str]] = {"reinforcement": ("mean_unresponsive_rewards", "reasoning_tokens_mean")}
"""More columns of the API's tables. Reasoning tokens are not counted apart here, so the last one is empty."""


def metrics_of(folder: Path, kind: str, *, after: int | None = None) -> list[dict[str, Any]]:
    """What each step measured, under the API's names, with some of our runs' own; of steps behind `after`, if given."""
    file = folder / METRICS_FILE
    if not file.is_file():
        return []
    names = _NAMES[kind]
    rows = None if after is None else _last(file, after)
    found = read_metrics(file) if rows is None else rows
    return [_row(row, names) for row in found if after is None or row["step"] > after]


def _last(file: Path, after: int) -> list[dict[str, Any]] | None:
    """The last lines of a file of metrics; None where not all steps behind `after` are among them."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        opened.seek(max(0, size - _TAIL_BYTES))
        lines = opened.read().split(b"\n")[:-1]
    whole = size <= _TAIL_BYTES
    rows = [metrics_row(line.decode(errors="replace"), str(file)) for line in lines[0 if whole else 1 :]]
    return rows if whole or (rows and rows[0]["step"] <= after + 1) else None


def _row(row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    found = {"step": row["step"], "total_steps": row.get("steps")}
    found |= {theirs: row[ours] for ours, theirs in names.items() if row.get(ours) is not None}
    if row.get("rollouts"):
        found["mean_unresponsive_rewards"] = row.get("failed", 0) / row["rollouts"]
    if "train_mean_reward" in found or "full_valid_mean_reward" in found:
        pairs = (("train_reward_mean", "train_mean_reward"), ("valid_reward_mean", "full_valid_mean_reward"))
        graders = [
            {"name": name.removeprefix(_OF_PARTS), "train_reward_mean": value}
            for name, value in row.items()
            if name.startswith(_OF_PARTS) and name != f"{_OF_PARTS}{TOTAL}"
        ]
        found["scores"] = {ours: found[theirs] for ours, theirs in pairs if theirs in found}
        found["scores"] |= {"graders": graders} if graders else {}
    found |= _of_api(row)
    seen = {"trained_tokens", "learning_rate", "seconds_left", "time"}
    return found | {name: row[name] for name in seen if row.get(name) is not None}


def events_of(rows: Sequence[Mapping[str, Any]]) -> list[JobEvent]:
    """One of each step."""
    return [_event(row) for row in rows]


def _event(row: Mapping[str, Any]) -> JobEvent:
    measured = ", ".join(f"{words}={row[name]:.4g}" for name, words in _WORDS.items() if name in row)
    total = f"/{row['total_steps']}" if row["total_steps"] else ""
    data = {name: value for name, value in row.items() if name not in ("time", "seconds_left")}
    return JobEvent(
        name=f"step/{row['step']}",
        message=f"Step {row['step']}{total}: {measured or 'nothing was measured'}",
        type="metrics",
        data=data,
        created_at=int(row["time"]) if "time" in row else None,
    )


def table_of(rows: Sequence[Mapping[str, Any]], kind: str) -> bytes:
    """The result file: a line of CSV per step."""
    written = io.StringIO()
    columns = ["step", *_NAMES[kind].values(), *_MORE.get(kind, ())]
    table = csv.DictWriter(written, columns, extrasaction="ignore", restval="", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return written.getvalue().encode()


def checkpoints_of(folder: Path) -> dict[int, Path]:
    """The whole checkpoints of a job with something learned, by the step that they were written after."""
    found = {int(path.name.removeprefix("step-")): path for path in list_checkpoints(folder)}
    return {step: path for step, path in found.items() if step > 0}


def checkpoint_events(folder: Path) -> list[JobEvent]:
    return [
        JobEvent(name=f"checkpoint/{step}", message=f"Checkpoint created at step {step}", created_at=at)
        for step, at in written_at(checkpoints_of(folder)).items()
    ]


def written_at(checkpoints: Mapping[int, Path]) -> dict[int, int]:
    """When each checkpoint was written, but for those that the job's process has removed since they were found."""
    found: dict[int, int] = {}
    for step, path in checkpoints.items():
        with suppress(FileNotFoundError):
            found[step] = int((path / CHECKPOINT_FILE).stat().st_mtime)
    return found


def checkpoint_of(folder: Path, step: int | None) -> Path | None:
    """The checkpoint after a step, the last one where no step is given; None: it is not kept."""
    found = checkpoints_of(folder)
    return found.get(max(found, default=0) if step is None else step)


_OF_GRADERS = "grader/"
_LATENCY = "latency"
_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True)
class GraderMeasures(Part):
    """Measures `grader/NAME/latency` in seconds, `grader/NAME/FLAG`, the rollouts in which a flag was set, and
    `grader/MODEL/prompt_tokens`, `…/completion_tokens` and `…/total_tokens` of the models that graders asked."""

    name = "grader_measures"

    def in_run(self, run: RunScope) -> RunHooks:
        return _Measures(run.context.store)


class _Measures(RunHooks):
    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._grades: dict[str, Mapping[str, Any]] = {}
        """By rollout, until its step is measured."""

    async def finished(self, groups: Sequence[Sequence[str]]) -> None:
        turns = asyncio.Semaphore(_AT_ONCE)

        async def one(rollout: str) -> None:
            async with turns:
                spans = (await self._store.query_spans(rollout, "latest")).items
            for span in spans:
                if GRADE in span.attributes:
                    self._grades[rollout] = json.loads(str(span.attributes[GRADE]))

        await asyncio.gather(*(one(rollout) for group in groups for rollout in group))

    def measure(self, sampled: Sampled) -> dict[str, float]:
        episodes = [*sampled.episodes, *sampled.dropped]
        found = [grade for e in episodes if (grade := self._grades.pop(e.rollout.rollout_id, None)) is not None]
        return measures_of(found)


def measures_of(grades: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics of grades as the agent notes them."""
    counts, seconds = Counter[str](), dict[str, list[float]]()
    for grade in grades:
        for one in grade["graders"]:
            seconds.setdefault(f"{_OF_GRADERS}{one['name']}/{_LATENCY}", []).append(one["seconds"])
            counts.update(f"{_OF_GRADERS}{one['name']}/{flag}" for flag in one["flags"])
        for model, usage in grade["model_grader_token_usage_per_model"].items():
            counts.update({f"{_OF_GRADERS}{model}/{kind}": count for kind, count in usage.items()})
    return {**{name: fmean(times) for name, times in seconds.items()}, **counts}


def _of_api(row: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a step under the names of the API's metrics event; {} where the step has none of them."""
    errors, times, tokens = dict[str, dict[str, Any]](), list[dict[str, Any]](), dict[str, dict[str, Any]]()
    for metric, value in row.items():
        name, _, kind = metric.removeprefix(_OF_GRADERS).rpartition("/")
        if not metric.startswith(_OF_GRADERS):
            continue
        if kind == _LATENCY:
            times.append({"name": name, "train_execution_latency_mean": value})
        elif kind.endswith("_tokens"):
            tokens.setdefault(name, {})[kind] = value
        else:
            means = {f"train_{kind}_mean": value / max(1, row.get("rollouts", 1)), f"train_{kind}_count": value}
            errors.setdefault(name, {"name": name}).update(means)
    found = {"errors": {"graders": list(errors.values())}, "timing": {"graders": times}}
    return {**found, "model_graders_token_usage": tokens} if times else {}
