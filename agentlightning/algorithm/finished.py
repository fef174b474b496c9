"""Finished rollouts that an interrupted run had not learned from, or whose learning no checkpoint has.

They are used where they are exact: enqueued under the weights of the checkpoint that the run goes on from, under the
same recipe, and with every token of the policies in training sampled by the checkpoint's version of them. All others
are sampled anew. Each is handed out once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentlightning.algorithm.base import TrainingContext
from agentlightning.algorithm.checkpoint import CheckpointInfo
from agentlightning.store.base import LightningStore
from agentlightning.types import Call, Outcome, Rollout, RolloutMode, RolloutRecord, RolloutStatus
from agentlightning.types.ids import random_hex
from agentlightning.types.names import ANNOTATION, JUDGED

if TYPE_CHECKING:
    from agentlightning.algorithm.settings import TrainingSettings

WEIGHTS = "weights"
"""The key of a rollout's metadata that says under which weights it was enqueued."""
_ENDED_BY_THEMSELVES = (Outcome.OK, Outcome.TRUNCATED, Outcome.AGENT_ERROR)
"""Outcomes that the death of a process cannot have caused."""


class FinishedRollouts:
    """Those of the steps to come, by step and task, in groups of siblings."""

    def __init__(self, weights: str, rollouts: Iterable[Rollout] = ()) -> None:
        """`weights` names the weights that are sampled from now: no other weights, of any course of the run, have the
        name."""
        self.weights = weights
        self._groups: dict[tuple[int, int], dict[str, list[Rollout]]] = {}
        for rollout in rollouts:
            about = rollout.metadata
            siblings = self._groups.setdefault((about["step"], about["task"]), {})
            siblings.setdefault(about["group"], []).append(rollout)

    def take(self, step: int, task: int, most: int) -> Sequence[Rollout]:
        """Finished siblings of one group for the task, at most so many; none where there are none."""
        groups = self._groups.get((step, task))
        return groups.pop(next(iter(groups)))[:most] if groups else ()


async def finished_before(
    context: TrainingContext, settings: TrainingSettings, info: CheckpointInfo, versions: Mapping[str, int]
) -> FinishedRollouts:
    """What a run that goes on from a checkpoint need not sample again; none of it in a deterministic run, which draws
    a step as a whole. `versions`: of the weights that are sampled from, by policy."""
    same = info.weights is not None and info.recipe is not None and info.recipe == context.recipe
    if context.resume_from is None or info.weights is None or not same or settings.deterministic:
        return FinishedRollouts(random_hex(8))
    steps = range(info.step + 1, info.step + 2 + settings.max_staleness)
    return await find_finished(context.store, context.run_id, info.weights, versions, steps)


async def find_finished(
    store: LightningStore, run_id: str | None, weights: str, versions: Mapping[str, int], steps: Sequence[int]
) -> FinishedRollouts:
    """Those of the run that weights of this name sampled for these steps; `versions` are theirs, by policy."""
    if run_id is None:
        return FinishedRollouts(weights)
    ended = [RolloutStatus.SUCCEEDED, RolloutStatus.FAILED]
    found = await store.query_rollouts(
        run_id_in=[run_id], mode_in=[RolloutMode.TRAIN], step_in=list(steps), status_in=ended, limit=-1
    )
    ids = [r.rollout_id for r in found if r.metadata.get(WEIGHTS) == weights and _is_of_a_group(r.metadata)]
    records = await store.query_records(ids) if ids else []
    exact = [r for r in records if _is_exact(r.calls, versions)]
    return FinishedRollouts(weights, [r.rollout for r in exact if await _ended_by_itself(store, r)])


async def _ended_by_itself(store: LightningStore, record: RolloutRecord) -> bool:
    """Whether no death of a process can be why it ended so. What a judge has said of siblings stays said: asking again
    costs again."""
    outcome = record.attempt and record.attempt.outcome
    if outcome is not Outcome.JUDGE_ERROR:
        return outcome in _ENDED_BY_THEMSELVES
    said = await store.query_spans(record.rollout.rollout_id, "latest", name=ANNOTATION)
    return any(JUDGED in span.attributes for span in said)


def _is_of_a_group(metadata: Mapping[str, Any]) -> bool:
    return isinstance(metadata.get("task"), int) and isinstance(metadata.get("group"), str)


def _is_exact(calls: Sequence[Call], versions: Mapping[str, int]) -> bool:
    trained = [call for call in calls if call.info.trained]
    known = all(call.versions for call in trained)
    sampled_by = {(call.info.policy, run.version) for call in trained for run in call.versions}
    return bool(trained) and known and sampled_by <= set(versions.items())
