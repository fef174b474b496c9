"""Small records that cross module borders: triplets, data sets, pages of results, hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Generic, Protocol, TypeVar, overload, runtime_checkable

from pydantic import AfterValidator, Field

from agentlightning.types.reward import checked_reward
from agentlightning.types.rollout import Record

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Triplet(Record):
    """A prompt, a response and a reward, given by an agent that records its own training data."""

    prompt: Any
    """Text, messages, or a mapping with `token_ids`."""
    response: Any
    """The same for what was sampled."""
    reward: Annotated[float, AfterValidator(checked_reward)] | None = None
    """What the call earned; None: nothing of its own."""
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
    """Those of this page."""
    limit: int
    """How many a page holds; -1: all."""
    offset: int
    """How many came before this page."""
    total: int
    """How many there are on all pages."""
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
    """Override what you want to see. All methods are async and take keyword arguments only."""

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:
        """Before the agent runs on a claimed rollout."""

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        """After the trace context of the rollout was opened."""

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        """Before the trace context of the rollout is closed."""

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Any) -> None:
        """After the attempt was finished in the store."""
