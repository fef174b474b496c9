"""A finished rollout among the others of its group, as a group reward sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.types.rollout import Rollout
from agentlightning.types.span import Span

Rewarded = float | Mapping[str, float]
"""A reward, or several by name, of which the first trains unless `reward_weights` says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sibling:
    """One of the rollouts of a task that were sampled together and ended without a failure."""

    rollout: Rollout
    """The rollout itself; its task is `task`."""
    conversations: Sequence[Sequence[Mapping[str, Any]]]
    """What was said, as chat messages: one conversation for each that no later call of the model continues, in the
    order in which they ended. Calls of judges and of other models than the policy are left out."""
    rewards: Mapping[str, float]
    """What the rollout as a whole earned by itself, by name; empty if the agent gave no reward."""
    spans: Sequence[Span]
    """Everything that was recorded of the attempt, `emit_annotation` included."""

    @property
    def task(self) -> Any:
        """The task, which is the same for all siblings."""
        return self.rollout.input

    @property
    def reward(self) -> float | None:
        """What the rollout earned by itself, or the first part of it; None if the agent gave no reward."""
        return next(iter(self.rewards.values()), None)

    @property
    def answer(self) -> str:
        """The text of the last message of the model; empty if it said nothing."""
        content = self.conversations[-1][-1].get("content") if self.conversations else None
        return content if isinstance(content, str) else ""


GroupReward = Callable[[Sequence[Sibling]], Sequence[Rewarded] | Awaitable[Sequence[Rewarded]]]
"""Rewards the rollouts of a group together: one reward for each sibling, in their order. It may be a coroutine."""
