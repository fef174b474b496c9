"""What graders did in a training, as metrics of each step: their time, what went wrong, and the tokens of models."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from agentlightning.algorithm.episode import Sampled
from agentlightning.algorithm.part import Part, RunHooks, RunScope
from agentlightning.finetuning.graders.agent import GRADE
from agentlightning.store.base import LightningStore

PREFIX = "grader/"
LATENCY = "latency"
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
            seconds.setdefault(f"{PREFIX}{one['name']}/{LATENCY}", []).append(one["seconds"])
            counts.update(f"{PREFIX}{one['name']}/{flag}" for flag in one["flags"])
        for model, usage in grade["model_grader_token_usage_per_model"].items():
            counts.update({f"{PREFIX}{model}/{kind}": count for kind, count in usage.items()})
    return {**{name: fmean(times) for name, times in seconds.items()}, **counts}


def of_api(row: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a step under the names of the API's metrics event; {} where the step has none of them."""
    errors, times, tokens = dict[str, dict[str, Any]](), list[dict[str, Any]](), dict[str, dict[str, Any]]()
    for metric, value in row.items():
        name, _, kind = metric.removeprefix(PREFIX).rpartition("/")
        if not metric.startswith(PREFIX):
            continue
        if kind == LATENCY:
            times.append({"name": name, "train_execution_latency_mean": value})
        elif kind.endswith("_tokens"):
            tokens.setdefault(name, {})[kind] = value
        else:
            means = {f"train_{kind}_mean": value / max(1, row.get("rollouts", 1)), f"train_{kind}_count": value}
            errors.setdefault(name, {"name": name}).update(means)
    found = {"errors": {"graders": list(errors.values())}, "timing": {"graders": times}}
    return {**found, "model_graders_token_usage": tokens} if times else {}
