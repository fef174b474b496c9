"""What a query may ask for: one frozen record per kind, which the protocol, the wire and the SQL share.

The public methods take the same names as keywords. Each record has its keywords beside it as a `TypedDict`, which is
all that a type checker and an editor need; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from agentlightning.errors import StoreError
from agentlightning.types import Outcome, RolloutMode, RolloutStatus, RunEventKind, RunStatus, WorkerStatus
from agentlightning.types.rollout import Record

FilterLogic = Literal["and", "or"]
SortOrder = Literal["asc", "desc"]
DEFAULT_LIMIT = -1
"""How many items a query returns when no limit is given: all."""


class PageKeywords(TypedDict, total=False):
    sort_by: str | None
    sort_order: SortOrder
    limit: int
    offset: int
    cursor: str | None


class PageQuery(Record):
    """Which part of an answer, in which order. `limit=-1` means all; `cursor` is a page's `next_cursor`."""

    sort_by: str | None = None
    sort_order: SortOrder = "asc"
    limit: int = Field(default=DEFAULT_LIMIT, ge=-1, le=2**31)
    offset: int = Field(default=0, ge=0, le=2**53)
    cursor: str | None = None

    def given(self) -> dict[str, Any]:
        """As keywords, without those that were left at their defaults."""
        return {name: value for name, value in self.__dict__.items() if name in self.model_fields_set}


class RolloutKeywords(PageKeywords, total=False):
    status: Sequence[RolloutStatus] | None
    """The older word for `status_in`."""
    rollout_ids: Sequence[str] | None
    """The older word for `rollout_id_in`."""
    status_in: Sequence[RolloutStatus] | None
    rollout_id_in: Sequence[str] | None
    rollout_id_contains: str | None
    run_id_in: Sequence[str] | None
    mode_in: Sequence[RolloutMode] | None
    step_in: Sequence[int] | None
    group_in: Sequence[str] | None
    outcome_in: Sequence[Outcome] | None
    reward_min: float | None
    reward_max: float | None
    text_contains: str | None
    filter_logic: FilterLogic


class RolloutQuery(PageQuery):
    """Rollouts of `run_id_in`, `mode_in`, `step_in`, `group_in`, `outcome_in` (of the latest attempt), with a reward
    from `reward_min` to `reward_max`, that have `text_contains` in their id or task; `filter_logic` joins the first
    three.

    Sorted by `step` or `reward`, only those that have one.
    """

    status_in: tuple[RolloutStatus, ...] | None = None
    rollout_id_in: tuple[str, ...] | None = None
    rollout_id_contains: str | None = None
    run_id_in: tuple[str, ...] | None = None
    mode_in: tuple[RolloutMode, ...] | None = None
    step_in: tuple[int, ...] | None = None
    group_in: tuple[str, ...] | None = None
    outcome_in: tuple[Outcome, ...] | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    text_contains: str | None = None
    filter_logic: FilterLogic = "and"


class AttemptQuery(PageQuery):
    sort_by: str | None = "sequence_id"


class SpanKeywords(PageKeywords, total=False):
    trace_id: str | None
    trace_id_contains: str | None
    span_id: str | None
    span_id_contains: str | None
    parent_id: str | None
    parent_id_contains: str | None
    name: str | None
    name_contains: str | None
    filter_logic: FilterLogic


class SpanQuery(PageQuery):
    """Spans of a rollout; `attempt_id=None` all attempts, "latest" the last one."""

    rollout_id: str
    attempt_id: str | None = None
    trace_id: str | None = None
    trace_id_contains: str | None = None
    span_id: str | None = None
    span_id_contains: str | None = None
    parent_id: str | None = None
    parent_id_contains: str | None = None
    name: str | None = None
    name_contains: str | None = None
    filter_logic: FilterLogic = "and"
    sort_by: str | None = "sequence_id"


class ResourcesKeywords(PageKeywords, total=False):
    resources_id: str | None
    resources_id_contains: str | None


class ResourcesQuery(PageQuery):
    resources_id: str | None = None
    resources_id_contains: str | None = None


class WorkerKeywords(PageKeywords, total=False):
    status_in: Sequence[WorkerStatus] | None
    worker_id_contains: str | None
    filter_logic: FilterLogic


class WorkerQuery(PageQuery):
    status_in: tuple[WorkerStatus, ...] | None = None
    worker_id_contains: str | None = None
    filter_logic: FilterLogic = "and"


class RunKeywords(PageKeywords, total=False):
    status_in: Sequence[RunStatus] | None
    run_id_contains: str | None


class RunQuery(PageQuery):
    status_in: tuple[RunStatus, ...] | None = None
    run_id_contains: str | None = None


class RunEventKeywords(PageKeywords, total=False):
    kind_in: Sequence[RunEventKind] | None
    step_min: int | None


class RunEventQuery(PageQuery):
    kind_in: tuple[RunEventKind, ...] | None = None
    step_min: int | None = None


KEYWORDS: dict[type[PageQuery], type] = {
    RolloutQuery: RolloutKeywords,
    AttemptQuery: PageKeywords,
    SpanQuery: SpanKeywords,
    ResourcesQuery: ResourcesKeywords,
    WorkerQuery: WorkerKeywords,
    RunQuery: RunKeywords,
    RunEventQuery: RunEventKeywords,
}
"""Which keywords make which record."""
_OLDER = {"status": "status_in", "rollout_ids": "rollout_id_in"}

Q = TypeVar("Q", bound=PageQuery)


def make(kind: type[Q], given: Mapping[str, Any]) -> Q:
    """The record of a query's keywords. Raises TypeError for an unknown one and `StoreError` for a bad value."""
    values = dict(given)
    if kind is RolloutQuery:
        for older, name in _OLDER.items():
            if older in values:
                if name in values:
                    raise TypeError(f"'{older}' is the older word for '{name}'; give one of them.")
                values[name] = values.pop(older)
    if unknown := values.keys() - kind.model_fields.keys():
        raise TypeError(f"A query has no keyword {sorted(unknown)}; it takes {', '.join(kind.model_fields)}.")
    try:
        return kind(**values)
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, e['loc']))} = {e['input']!r:.80}: {e['msg']}" for e in error.errors())
        raise StoreError(f"The query is not valid: {reasons}.") from None
