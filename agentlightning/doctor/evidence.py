"""Evidence: what is read of a run before it is judged: its steps, and rollouts of its end and its start.

However long the run, what is read is bounded. Read-only.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from agentlightning.adapter.conversations import Conversation, conversations
from agentlightning.algorithm.credit.advantage import ADVANTAGES
from agentlightning.algorithm.credit.units import OUTCOME_USE
from agentlightning.algorithm.episode import Episode, collect
from agentlightning.algorithm.parts.constraint import recorded_constraints
from agentlightning.errors import StoreError
from agentlightning.metrics.sink import checked_row
from agentlightning.runner.frameworks import caches_on
from agentlightning.store.base import LightningStore
from agentlightning.types import FINISHED_ROLLOUT, Outcome, Rollout, RolloutMode, Run, RunEvent, Span
from agentlightning.types.recording import FORK_OF
from agentlightning.types.reward import weights_in

LAST_ROLLOUTS = 384
"""Finished training rollouts of the end of the run that are read."""
FIRST_ROLLOUTS = 96
"""And of its start, to compare with."""
WITH_TEXT = 64
"""How many rollouts at each end have their messages read, too."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was read of a run, or of an agent's dry run."""

    steps: Sequence[Mapping[str, Any]] = ()
    """Metrics of each learned step, in order."""
    episodes: Sequence[Episode] = ()
    """The last rollouts, in the order in which they began."""
    early: Sequence[Episode] = ()
    """The first ones; none where they are among the last."""
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    """All spans of the latest attempt of some of them, by rollout id."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    run: Run | None = None
    refused_requests: Mapping[str, int] = field(default_factory=dict)
    """Requests to the gateway that belonged to no attempt, by why they were refused."""

    earlier_errors: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Why earlier attempts at a rollout failed, by rollout id, of some of those that were tried again."""

    caches: Sequence[str] = ()
    """What is to be said of frameworks' caches that are on in this process."""

    provider: bool = False
    """The agent asks another provider's model on purpose, whose tokens nobody knows."""

    @cached_property
    def talks(self) -> Mapping[str, Sequence[Conversation]]:
        """The model calls as people read them, by rollout id, of the rollouts whose spans were read."""
        return {rollout_id: conversations(spans) for rollout_id, spans in self.spans.items()}

    @cached_property
    def masked(self) -> list[Episode]:
        """Rollouts that the update leaves out because of how they ended."""
        chosen = {Outcome(name): use for name, use in dict(self.settings.get("outcome_use") or {}).items()}
        uses = {**OUTCOME_USE, **chosen}
        return [e for e in self.episodes if uses[e.outcome] == "mask"]

    @cached_property
    def rewards(self) -> list[float]:
        """The rewards of all rollouts that were read and have one."""
        return [e.reward for e in (*self.early, *self.episodes) if e.reward is not None]

    @property
    def supervised(self) -> bool:
        """Whether the run learned examples that it was given: its rollouts are validations, and nothing learns from
        what they earned."""
        return self.settings.get("source") in ("chats", "pairs", "run")

    @property
    def spread(self) -> float:
        """The difference between the highest and the lowest reward that was read."""
        return max(self.rewards) - min(self.rewards) if self.rewards else 0.0

    @cached_property
    def solved(self) -> bool:
        """Whether the last rollouts earn nearly all that any rollout of the run has earned."""
        late = [e.reward for e in self.episodes if e.reward is not None]
        if not late or self.spread == 0:
            return False
        return sum(late) / len(late) >= min(self.rewards) + 0.85 * self.spread

    @cached_property
    def groups(self) -> list[list[Episode]]:
        """Siblings among the last rollouts that were neither masked nor failed; groups of at least two. Of a run that
        learned examples none: validations are compared with nothing."""
        if self.supervised:
            return []
        found: dict[Any, list[Episode]] = {}
        for e in self.episodes:
            if e.good and e.reward is not None:
                alone = json.dumps(e.rollout.input, default=repr)  # of a dry run: siblings have the same task
                found.setdefault(e.rollout.group or alone, []).append(e)
        return [group for group in found.values() if len(group) > 1]

    def is_flat(self, group: Sequence[Episode]) -> bool:
        """Whether these rollouts all earned the same, also in parts that have a constraint, and with an advantage of
        parts in each that has a weight."""
        advantage = ADVANTAGES.get(str(self.settings.get("advantage")))
        decoupled = advantage is not None and advantage.decoupled
        names = [
            *(weights_in(self.settings) if decoupled else ()),
            *(c.part for c in recorded_constraints(self.settings)),
        ]
        earned = {(e.reward, *(tuple(r.parts.get(n, 0.0) for n in names) for r in e.rewards if names)) for e in group}
        return len(earned) == 1

    def series(self, name: str) -> list[float]:
        """A metric over the steps that have it; of several policies the mean."""
        found = []
        for step in self.steps:
            values = [v for key, v in step.items() if key.split("/")[-1] == name and isinstance(v, int | float)]
            if values:
                found.append(float(sum(values) / len(values)))
        return found


async def gather(store: LightningStore, run: Run | None = None) -> Evidence:
    """Read a run's evidence from its store, also while it goes on. Without a run: of all that is in the store."""
    runs = None if run is None else [run.run_id]
    last = await _finished(store, runs, "desc", LAST_ROLLOUTS)
    first = await _finished(store, runs, "asc", FIRST_ROLLOUTS)
    known = {r.rollout_id for r in last}
    episodes = await collect(store, [r.rollout_id for r in reversed(last)])
    early = await collect(store, [r.rollout_id for r in first if r.rollout_id not in known])
    return Evidence(
        steps=[] if run is None else await learned_steps(store, run.run_id),
        episodes=episodes,
        early=early,
        spans=await read_spans(store, [*early[:WITH_TEXT], *episodes[-WITH_TEXT:]]),
        earlier_errors=await _earlier_errors(store, episodes),
        settings={} if run is None else run.settings,
        run=run,
        caches=caches_on(),
    )


async def learned_steps(store: LightningStore, run_id: str) -> list[dict[str, Any]]:
    """Metrics of the steps that learned, in order; the validation before the first step is none."""
    events = await store.query_run_events(run_id, kind_in=["step"])
    return sorted((_checked(e) for e in events if e.data.get("step")), key=lambda data: data["step"])


def _checked(event: RunEvent) -> dict[str, Any]:
    try:
        return checked_row(event.data)
    except ValueError as error:
        raise StoreError(
            f"run_events.data of '{event.event_id}' is damaged in the store: {error}. Keep a copy of the store, and "
            "repair or delete that row."
        ) from None


async def read_spans(store: LightningStore, episodes: Sequence[Episode]) -> dict[str, Sequence[Span]]:
    """Reads all spans of the latest attempts of these rollouts."""
    ids = [e.rollout.rollout_id for e in episodes]
    found = await asyncio.gather(*(store.query_spans(rollout_id, "latest") for rollout_id in ids))
    return {rollout_id: page.items for rollout_id, page in zip(ids, found, strict=True)}


async def _earlier_errors(store: LightningStore, episodes: Sequence[Episode]) -> dict[str, list[str]]:
    """Errors of the earlier attempts of the last `WITH_TEXT` rollouts that were tried more than once."""
    again = [e.rollout.rollout_id for e in episodes if e.attempt is not None and e.attempt.sequence_id > 1]
    found: dict[str, list[str]] = {}
    for rollout_id in again[-WITH_TEXT:]:
        attempts = list(await store.query_attempts(rollout_id, sort_by="sequence_id"))
        found[rollout_id] = [a.error or f"no message ({a.outcome or a.status})" for a in attempts[:-1]]
    return found


async def _finished(store: LightningStore, runs: list[str] | None, order: Any, limit: int) -> list[Rollout]:
    """Training rollouts, or where there are none, whatever there is; validations and forks lie between them."""
    page = await store.query_rollouts(
        run_id_in=runs, status_in=sorted(FINISHED_ROLLOUT), sort_by="start_time", sort_order=order, limit=6 * limit
    )
    training = [r for r in page if r.mode is RolloutMode.TRAIN and FORK_OF not in r.metadata]
    return (training or list(page))[:limit]
