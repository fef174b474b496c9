"""What an algorithm reads of one rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentlightning.types.call import Call
from agentlightning.types.rollout import Attempt, AttemptedRollout, Rollout
from agentlightning.types.span import Span


@dataclass(frozen=True, slots=True, eq=False)
class RolloutRecord:
    """A rollout with the calls of its latest attempt, and those of that attempt's spans that say what was earned."""

    rollout: AttemptedRollout | Rollout
    calls: Sequence[Call]
    spans: Sequence[Span]
    """Spans that carry a reward, and triplets that the agent returned, in their order."""

    @property
    def attempt(self) -> Attempt | None:
        """None for a rollout that nobody has claimed."""
        return self.rollout.attempt if isinstance(self.rollout, AttemptedRollout) else None
