"""Evaluation: candidates on tasks, as ordinary rollouts that run beside each other.

A rollout's id follows from its run, candidate, split and task. So one that is finished in the store is read, not run
again, whoever asked for it first and however often the process died since.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentlightning.adapter.conversations import conversations
from agentlightning.algorithm.base import TrainingContext
from agentlightning.algorithm.episode import make_episode
from agentlightning.algorithm.prompts.budget import Ledger
from agentlightning.algorithm.prompts.candidate import Candidate
from agentlightning.algorithm.sampling.rollouts import enqueue, finished_groups, sampling_seed
from agentlightning.errors import ConfigError
from agentlightning.types import (
    Dataset,
    EnqueueRolloutRequest,
    NamedResources,
    Outcome,
    PromptTemplate,
    RolloutConfig,
    RolloutMode,
    RolloutRecord,
    RolloutStatus,
    Span,
)
from agentlightning.types.call import number_at

Split = Literal["train", "val"]
_Wanted = tuple[Candidate, Split, int]
"""A candidate on a task of a split."""
_MODES = {"train": RolloutMode.TRAIN, "val": RolloutMode.VAL}
MOST_TRIES = 100
"""How often a rollout that a stop or a death of the process cancelled is begun anew."""

OF_THE_PROMPT = frozenset({Outcome.AGENT_ERROR, Outcome.TIMEOUT})
"""Failures that a prompt may be to blame for; the others are the system's."""


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One candidate on one task."""

    task: int
    """Index into its split."""
    input: Any
    reward: float | None
    """None where the rollout failed or earned nothing: it counts in no mean."""
    outcome: Outcome
    error: str | None
    messages: Sequence[Mapping[str, Any]]
    """What was said: the last conversation of the rollout, with its answer."""
    messages_by: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """The last conversation of each agent by its name, in the order in which they ended; "" has no name."""
    input_tokens: int = 0
    output_tokens: int = 0
    refusal: str | None = None
    """Why its model calls failed, where it made some and none was answered."""

    @property
    def failed(self) -> bool:
        """Whether the trial failed in a way that its prompt may have caused."""
        return self.outcome in OF_THE_PROMPT


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """Candidates are evaluated on these tasks of a split."""

    candidate: Candidate
    split: Split
    tasks: Sequence[int]


class Evaluator:
    """Runs candidates on tasks and remembers what came of it."""

    def __init__(
        self,
        context: TrainingContext,
        templates: Mapping[str, PromptTemplate],
        tasks: Mapping[Split, Dataset[Any]],
        ledger: Ledger,
        config: RolloutConfig,
        reward_range: tuple[float, float],
        under: str = "",
        seed: int = 0,
    ) -> None:
        """`under`: begins the ids of its rollouts, behind the run's. With the same seed, candidates draw alike on a
        task, so that fewer tasks are enough to see a difference.
        """
        self._seed = seed
        self._under = under
        self._context = context
        self._templates = templates
        self._tasks = tasks
        self._ledger = ledger
        self._config = config
        self._range = reward_range
        self._known: dict[tuple[str, Split, int], Trial] = {}
        self._resources_ids: dict[str, str] = {}

    def known(self, candidate: Candidate, split: Split) -> dict[int, Trial]:
        """The trials of a candidate so far, by task."""
        return {task: t for (key, where, task), t in self._known.items() if (key, where) == (candidate.key, split)}

    async def run(self, wanted: Sequence[EvaluationRequest], status: str) -> list[list[Trial]]:
        """The trials of each request, in the order of its tasks; what is known already costs nothing.

        Raises BudgetSpent before anything is begun if the rest does not cover all that is new, and Stopped.
        """
        new: list[_Wanted] = list(dict.fromkeys((a.candidate, a.split, task) for a in wanted for task in a.tasks))
        new = [item for item in new if (item[0].key, item[1], item[2]) not in self._known]
        self._ledger.admit_rollouts(len(new))
        for (candidate, split, task), record in zip(new, await self._records(new, status), strict=True):
            trial = await self._trial(task, record)
            self._known[candidate.key, split, task] = trial
            self._ledger.agent_input += trial.input_tokens
            self._ledger.agent_output += trial.output_tokens
        return [[self._known[a.candidate.key, a.split, task] for task in a.tasks] for a in wanted]

    async def resources_id(self, candidate: Candidate) -> str:
        """The resources with the candidate's texts, stored once."""
        if candidate.key not in self._resources_ids:
            stored = await self._context.store.add_resources(self.resources(candidate))
            self._resources_ids[candidate.key] = stored.resources_id
        return self._resources_ids[candidate.key]

    def resources(self, candidate: Candidate) -> NamedResources:
        """All resources of the run, with the candidate's texts."""
        base = self._context.resources.resources if self._context.resources else {}
        return {**base, **candidate.resources(self._templates)}

    async def _records(self, wanted: Sequence[_Wanted], status: str) -> list[RolloutRecord]:
        """Finished rollouts, those that were cancelled begun anew."""
        found: list[RolloutRecord | None] = [None] * len(wanted)
        for number in range(MOST_TRIES):
            open_ones = [n for n, record in enumerate(found) if record is None]
            if not open_ones:
                break
            requests = {n: await self._request(*wanted[n], number) for n in open_ones}
            there = await self._read([r.rollout_id or "" for r in requests.values()])
            missing = [r for r in requests.values() if r.rollout_id not in there]
            ids = await enqueue(self._context, missing)
            if ids:
                await finished_groups(self._context, [ids], 1, status)
                there |= await self._read(ids)
            for n, request in requests.items():
                record = there[request.rollout_id or ""]
                self._refuse_other_task(wanted[n], record)
                found[n] = None if record.rollout.status is RolloutStatus.CANCELLED else record
        return [record for record in found if record is not None]

    async def _read(self, ids: Sequence[str]) -> dict[str, RolloutRecord]:
        return {record.rollout.rollout_id: record for record in await self._context.store.query_records(ids)}

    def _refuse_other_task(self, wanted: _Wanted, record: RolloutRecord) -> None:
        """Raises ConfigError where the run was begun with other tasks: their rewards would be taken for those of new
        ones.
        """
        _, split, task = wanted
        before, now = (_as_json(t) for t in (record.rollout.input, self._tasks[split][task]))
        if before is not None and now is not None and before != now:
            what = {"train": "training", "val": "validation"}[split]
            raise ConfigError(
                f"The {what} tasks have changed since this run was begun: number {task} was {before[:200]}, and is now "
                f"{now[:200]}. What was measured on the ones before says nothing of these. Resume with the tasks of "
                f"before ({self._context.run_dir} has them), or start a new run."
            )

    async def _request(self, candidate: Candidate, split: Split, task: int, number: int) -> EnqueueRolloutRequest:
        again = f"-{number}" if number else ""
        return EnqueueRolloutRequest(
            input=self._tasks[split][task],
            mode=_MODES[split],
            resources_id=await self.resources_id(candidate),
            config=self._config,
            metadata={"candidate": candidate.key, "task": task, **sampling_seed(self._seed, split, task)},
            rollout_id=f"{self._context.run_id or 'run'}-{self._under}{candidate.key}-{split}{task}{again}",
        )

    async def _trial(self, task: int, record: RolloutRecord) -> Trial:
        episode = make_episode(record.rollout, record.attempt, record.calls, record.spans)
        reward = episode.reward if episode.good else None
        low, high = self._range
        if reward is not None and not low <= reward <= high:
            raise ConfigError(
                f"Task {task} earned {reward:g}, which is outside of reward_range=({low:g}, {high:g}). Give the range "
                "that rewards can have, for example reward_range=(-1, 1), or --set 'reward_range=[-1, 1]'."
            )
        spans = list(await self._context.store.query_spans(record.rollout.rollout_id, "latest"))
        with_answers = [c for c in conversations(spans) if c.answer is not None]
        messages_by: dict[str, Sequence[Mapping[str, Any]]] = {}
        for call in with_answers:
            messages_by.pop(call.agent or "", None)  # what is put in anew comes last
            messages_by[call.agent or ""] = [*call.messages, call.answer or {}]
        used = [_usage(span) for span in spans]
        return Trial(
            task=task,
            input=record.rollout.input,
            reward=reward,
            outcome=episode.outcome,
            error=record.attempt.error if record.attempt else None,
            messages=next(reversed(messages_by.values()), []),
            messages_by=messages_by,
            input_tokens=sum(given for given, _ in used),
            output_tokens=sum(answered for _, answered in used),
            refusal=None if with_answers else _refusal(spans),
        )


def _as_json(task: Any) -> str | None:
    """A text that is equal for equal tasks; None for other than JSON values, which the store holds in another form."""
    try:
        return json.dumps(task, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError):
        return None


def _refusal(spans: Sequence[Span]) -> str | None:
    """What the last failed model call says."""
    failed = [s for s in spans if s.status.status_code == "ERROR" and "gen_ai.request.model" in s.attributes]
    return failed[-1].status.description or "it says nothing" if failed else None


def _usage(span: Span) -> tuple[int, int]:
    return int(number_at(span, "gen_ai.usage.input_tokens")), int(number_at(span, "gen_ai.usage.output_tokens"))


def mean(trials: Sequence[Trial]) -> float | None:
    """The mean reward of those that have one; None if none has."""
    rewards = [t.reward for t in trials if t.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


def pairs(before: Mapping[int, Trial], after: Mapping[int, Trial]) -> Iterator[tuple[float, float]]:
    """The rewards of two candidates on the tasks that both have one for, in the order of the tasks."""
    for task in sorted(before.keys() & after.keys()):
        first, second = before[task].reward, after[task].reward
        if first is not None and second is not None:
            yield first, second


def more_failures(before: Mapping[int, Trial], after: Mapping[int, Trial]) -> int:
    """On how many more of their common tasks the second candidate fails than the first."""
    common = before.keys() & after.keys()
    return sum(after[task].failed - before[task].failed for task in common)
