"""Episodes: finished rollouts with what was sampled in them and what they earned, as an algorithm reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from agentlightning.store.base import LightningStore
from agentlightning.types import Attempt, AttemptedRollout, Call, Outcome, Rollout
from agentlightning.types.reward import find_final_reward


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One finished rollout: its last attempt, the reward of that attempt, and its calls in order."""

    rollout: Rollout
    attempt: Attempt | None
    reward: float | None
    calls: Sequence[Call]

    @property
    def outcome(self) -> Outcome:
        """A rollout without an outcome was never run: that is the system's failure."""
        return (self.attempt and self.attempt.outcome) or Outcome.INFRA_ERROR

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy in training sampled."""
        return sum(len(c.response_ids) for c in self.calls if c.info.trained)


async def collect(store: LightningStore, rollout_ids: Sequence[str]) -> list[Episode]:
    """Read finished rollouts back from the store, in the order of `rollout_ids`."""
    calls = await store.query_calls(rollout_ids)
    singles = await asyncio.gather(*(_single(store, i) for i in rollout_ids))
    return [
        Episode(rollout, attempt, reward, calls.get(rollout.rollout_id, ()))
        for rollout, attempt, reward in singles
        if rollout is not None
    ]


async def _single(store: LightningStore, rollout_id: str) -> tuple[Rollout | None, Attempt | None, float | None]:
    rollout = await store.get_rollout_by_id(rollout_id)
    if not isinstance(rollout, AttemptedRollout):
        return rollout, None, None
    spans = await store.query_spans(rollout_id, rollout.attempt.attempt_id)
    return rollout, rollout.attempt, find_final_reward(spans.items)
