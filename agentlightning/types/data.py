"""Small records that cross module borders: triplets, data sets, pages of results, hooks, what an algorithm reads of one
rollout, and a rollout among the others of its group, as a group reward sees it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Protocol, TypeVar, overload, runtime_checkable

from pydantic import AfterValidator, Field

from agentlightning.types.call import Call
from agentlightning.types.reward import checked_reward
from agentlightning.types.rollout import Attempt, AttemptedRollout, Record, Rollout
from agentlightning.types.span import Span

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Triplet(Record):
    """A prompt, a response and a reward, given by an agent that records its own training data."""

    prompt: Any
    """Text, messages, or a mapping with `token_ids`."""
    response: Any
    """What was sampled, in the same forms."""
    reward: Annotated[float, AfterValidator(checked_reward)] | None = None
    """What the call earned by itself; None: nothing."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """`response_id` names the recorded call that is meant; `logprobs` goes with token ids of the agent's own."""


@runtime_checkable
class Dataset(Protocol[T_co]):
    """Anything with `__getitem__` and `__len__`; a list is one."""

    def __getitem__(self, index: int, /) -> T_co: ...

    def __len__(self) -> int: ...


class PaginatedResult(Record, Generic[T]):
    """One page of a query. Iterates, indexes and counts its items; `total` is the size of the whole answer."""

    items: Sequence[T]
    """The items of this page."""
    limit: int
    """How many items a page holds; -1: all."""
    offset: int
    """How many items came before this page."""
    total: int
    """How many items all pages have together."""
    next_cursor: str | None = None
    """Give it as `cursor` to the same query for the page that follows; None on the last page."""

    def __iter__(self) -> Iterator[T]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return iter(self.items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


Sequence.register(PaginatedResult)  # pyright: ignore[reportAttributeAccessIssue]


class Hook:
    """Base class of hooks: override what you want to see. All methods are async and take keyword arguments only."""

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:
        """Before the agent runs on a claimed rollout."""

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        """After the trace context of the rollout was opened."""

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        """Before the trace context of the rollout is closed."""

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Any) -> None:
        """After the attempt was finished in the store."""


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
