"""Queries with filters, sorting and pages, over every table a user may search; and all that an algorithm reads of
rollouts, in one transaction: the rollouts, their calls, and what they earned.

The order of insertion is the default order, and also what sorting by a start time means: both only ever grow, and the
first is the primary key, so first pages stay fast however large a table becomes.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from sqlalchemy import Column, ColumnElement, Select, Table, and_, func, literal, or_, select, tuple_

from agentlightning.errors import StoreError
from agentlightning.store.database.counters import read_counters
from agentlightning.store.database.schema import (
    attempts as attempts_table,
    resources as resources_table,
    rollouts as rollouts_table,
    run_events as events_table,
    runs as runs_table,
    spans as spans_table,
    workers as workers_table,
)
from agentlightning.store.database.transaction import IDS_PER_QUERY, Row, Transaction
from agentlightning.store.operations import calls, resources, rollouts, runs, workers
from agentlightning.store.operations.attempts import ATTEMPT_COLUMNS
from agentlightning.store.operations.codec import to_attempt
from agentlightning.store.operations.spans import SPAN_COLUMNS, to_span, whole
from agentlightning.store.queries import (
    AttemptQuery,
    FilterLogic,
    PageQuery,
    ResourcesQuery,
    RolloutQuery,
    RunEventQuery,
    RunQuery,
    SpanQuery,
    WorkerQuery,
)
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutRecord,
    RolloutStatus,
    Run,
    RunEvent,
    Span,
    Worker,
)
from agentlightning.types.names import REWARD, TRIPLET
from agentlightning.types.reward import AGENTOPS_OUTPUTS

T = TypeVar("T")
MOST_TASK = 2000
"""How many characters a list of rollouts shows of a task, and of an error."""


class ListedRollout(NamedTuple):
    """A rollout in a list: `task` and `error` are the beginnings of its input, as JSON text, and of its error."""

    rollout_id: str
    task: str
    mode: str | None
    status: str
    step: int | None
    group: str | None
    reward: float | None
    outcome: str | None
    error: str | None
    start_time: float
    end_time: float | None
    attempts: int
    run_id: str | None


class Page:
    """Which part of an answer is wanted, in which order.

    A `cursor` says where the page before ended: the value it was sorted by and the row's number. What follows is
    found by index however far it is, and rows that come or go meanwhile shift nothing.
    """

    __slots__ = ("after", "limit", "offset", "sort_by", "sort_order")

    def __init__(self, query: PageQuery):
        if query.cursor is not None and query.offset:
            raise StoreError("Give a cursor or an offset, not both.")
        self.sort_by, self.sort_order, self.limit, self.offset = (
            query.sort_by,
            query.sort_order,
            query.limit,
            query.offset,
        )
        self.after = None if query.cursor is None else self._decode(query.cursor)

    def cursor(self, position: Sequence[Any]) -> str:
        """The cursor of a row at these values of the sort columns."""
        text = msgspec.json.encode([self.sort_by, self.sort_order, *position])
        return base64.urlsafe_b64encode(text).decode().rstrip("=")

    def _decode(self, cursor: str) -> list[Any]:
        try:
            padded = cursor.encode() + b"=" * (-len(cursor) % 4)
            sort_by, sort_order, *position = msgspec.json.decode(base64.urlsafe_b64decode(padded), type=list[Any])
            if not isinstance(position[-1], int) or any(isinstance(value, list | dict) for value in position):
                raise ValueError("no row number")
        except (ValueError, IndexError, msgspec.MsgspecError):
            raise StoreError("This cursor is not one that a page came with; take next_cursor as it is.") from None
        if (sort_by, sort_order) != (self.sort_by, self.sort_order):
            raise StoreError(f"This cursor belongs to a query sorted by {sort_by} {sort_order}; repeat that query.")
        return position


def _contains(column: ColumnElement[Any], text: str) -> ColumnElement[bool]:
    return column.contains(text, autoescape=True)


def _combine(conditions: Sequence[ColumnElement[bool]], logic: FilterLogic) -> list[ColumnElement[bool]]:
    if len(conditions) < 2:
        return list(conditions)
    return [or_(*conditions) if logic == "or" else and_(*conditions)]


def _sort_columns(table: Table, page: Page, allowed: Sequence[str]) -> list[ColumnElement[Any]]:
    name = page.sort_by
    if name is not None and name not in allowed:
        raise StoreError(f"Cannot sort by '{name}'; choose one of {', '.join(sorted(allowed))}.")
    columns = [] if name in (None, "start_time", "create_time") else [table.c[name]]
    return [*columns, table.c.seq]


def _follows(columns: Sequence[ColumnElement[Any]], page: Page) -> ColumnElement[bool]:
    """The condition on rows after the page's cursor."""
    assert page.after is not None
    nullable = [c.name for c in columns if isinstance(c, Column) and c.nullable and c.name not in _ONLY_THOSE_WITH]
    if nullable:
        raise StoreError(f"'{nullable[0]}' may be empty, so pages sorted by it have no cursor; use offset.")
    kinds = [(int, float) if column.type.python_type is float else column.type.python_type for column in columns]
    if len(kinds) != len(page.after) or not all(map(isinstance, page.after, kinds)):
        raise StoreError("This cursor is not one that a page came with; take next_cursor as it is.")
    here = tuple_(*columns)
    there = tuple_(*[literal(value, column.type) for column, value in zip(columns, page.after, strict=True)])
    return here < there if page.sort_order == "desc" else here > there


def _page(
    tx: Transaction,
    table: Table,
    statement: Select[Any],
    page: Page,
    sorts: Sequence[str],
    make: Callable[[Row], T],
    total: Callable[[], int] | None = None,
) -> PaginatedResult[T]:
    """Run a query; the total is counted only where the page itself does not show it."""
    columns = _sort_columns(table, page, sorts)
    width = len(statement.selected_columns)
    paged = statement.add_columns(*[column.label(f"sort_{n}") for n, column in enumerate(columns)])
    paged = paged.order_by(*[column.desc() if page.sort_order == "desc" else column.asc() for column in columns])
    if page.after is not None:
        paged = paged.where(_follows(columns, page))
    if page.limit >= 0:
        paged = paged.limit(page.limit)
    if page.offset:
        # SQLite knows OFFSET only after a LIMIT.
        paged = paged.limit(page.limit if page.limit >= 0 else 2**62).offset(page.offset)
    rows = tx.select(paged)
    full = 0 < len(rows) == page.limit
    if page.after is None and not full and (rows or not page.offset) and page.limit != 0:
        count = page.offset + len(rows)
    else:
        count = total() if total is not None else _count(tx, statement)
    return PaginatedResult.model_construct(
        items=[make(row[:width]) for row in rows],
        limit=page.limit,
        offset=page.offset,
        total=count,
        next_cursor=page.cursor(rows[-1][width:]) if full and None not in rows[-1][width:] else None,
    )


def _count(tx: Transaction, statement: Select[Any]) -> int:
    counted = statement.with_only_columns(func.count(), maintain_column_froms=True)
    return tx.select(counted)[0][0]


_ONLY_THOSE_WITH = ("step", "reward")
"""Columns by which only the rows that have a value are sorted."""
_ROLLOUT_SORTS = ("rollout_id", "start_time", "end_time", "mode", "status", "resources_id", *_ONLY_THOSE_WITH)
_ATTEMPT_SORTS = (
    "attempt_id",
    "sequence_id",
    "start_time",
    "end_time",
    "status",
    "worker_id",
    "last_heartbeat_time",
    "outcome",
)
_SPAN_SORTS = ("span_id", "sequence_id", "trace_id", "parent_id", "name", "start_time", "end_time", "attempt_id")
_RESOURCES_SORTS = ("resources_id", "version", "create_time", "update_time")
_WORKER_SORTS = (
    "worker_id",
    "status",
    "last_heartbeat_time",
    "last_dequeue_time",
    "last_busy_time",
    "last_idle_time",
    "current_rollout_id",
    "current_attempt_id",
)


def query_rollouts(tx: Transaction, query: RolloutQuery) -> PaginatedResult[Rollout]:
    """Each with its latest attempt, if it has one."""
    statuses = None if query.status_in is None else [status.value for status in query.status_in]
    conditions = rollout_conditions(query)
    statement = rollouts.SELECT_WITH_ATTEMPT.where(*conditions)
    total = (lambda: _total(tx, statuses)) if len(conditions) == (statuses is not None) else None
    return _page(tx, rollouts_table, statement, Page(query), _ROLLOUT_SORTS, rollouts.to_either, total)


def list_rollouts(tx: Transaction, query: RolloutQuery) -> PaginatedResult[ListedRollout]:
    """For tables that people look through: little of each, and no total, which `count_rollouts` gives."""
    t, a = rollouts_table.c, attempts_table.c
    columns: list[ColumnElement[Any]] = [
        t.rollout_id,
        func.substr(t.input, 1, MOST_TASK),
        t.mode,
        t.status,
        t.step,
        t.group_id,
        t.reward,
        a.outcome,
        func.substr(a.error, 1, MOST_TASK),
        t.start_time,
        t.end_time,
        t.attempts,
        t.run_id,
    ]
    joined = rollouts_table.outerjoin(attempts_table, t.latest_attempt_id == a.attempt_id)
    statement = select(*columns).select_from(joined)
    chosen = statement.where(*rollout_conditions(query))
    return _page(tx, rollouts_table, chosen, Page(query), _ROLLOUT_SORTS, ListedRollout._make, lambda: -1)


def count_rollouts(tx: Transaction, query: RolloutQuery, at_most: int) -> int:
    """How many there are, as far as `at_most`."""
    chosen = select(rollouts_table.c.seq).where(*rollout_conditions(query)).limit(at_most)
    return tx.select(select(func.count()).select_from(chosen.subquery()))[0][0]


def rollout_conditions(query: RolloutQuery) -> list[ColumnElement[bool]]:
    """What the rows of a query fulfil, all of it."""
    t, a = rollouts_table.c, attempts_table.c
    joined: list[ColumnElement[bool]] = []
    if query.status_in is not None:
        joined.append(t.status.in_([status.value for status in query.status_in]))
    if query.rollout_id_in is not None:
        joined.append(t.rollout_id.in_(query.rollout_id_in))
    if query.rollout_id_contains is not None:
        joined.append(_contains(t.rollout_id, query.rollout_id_contains))
    chosen = _combine(joined, query.filter_logic)
    if query.run_id_in is not None:
        chosen.append(t.run_id.in_(query.run_id_in))
    if query.mode_in is not None:
        chosen.append(t.mode.in_([mode.value for mode in query.mode_in]))
    if query.step_in is not None:
        chosen.append(t.step.in_(query.step_in))
    if query.group_in is not None:
        chosen.append(t.group_id.in_(query.group_in))
    if query.outcome_in is not None:
        ended = select(a.attempt_id).where(a.outcome.in_([outcome.value for outcome in query.outcome_in]))
        chosen.append(t.latest_attempt_id.in_(ended))
    if query.reward_min is not None:
        chosen.append(t.reward >= query.reward_min)
    if query.reward_max is not None:
        chosen.append(t.reward <= query.reward_max)
    if query.text_contains is not None:
        text = query.text_contains
        chosen.append(or_(_contains(t.input, text), _contains(t.rollout_id, text)))
    if query.sort_by in _ONLY_THOSE_WITH:
        chosen.append(t[query.sort_by].is_not(None))
    return chosen


def _total(tx: Transaction, statuses: Sequence[str] | None) -> int:
    """How many rollouts there are in these statuses, from the counters."""
    chosen = [status.value for status in RolloutStatus] if statuses is None else set(statuses)
    values = read_counters(tx)
    return sum(values[f"rollouts.{status}"] for status in chosen)


def query_attempts(tx: Transaction, rollout_id: str, query: AttemptQuery) -> PaginatedResult[Attempt]:
    statement = select(*ATTEMPT_COLUMNS).where(attempts_table.c.rollout_id == rollout_id)
    return _page(tx, attempts_table, statement, Page(query), _ATTEMPT_SORTS, to_attempt)


_SPAN_FILTERS = ("trace_id", "span_id", "parent_id", "name")


def query_spans(tx: Transaction, query: SpanQuery) -> PaginatedResult[Span]:
    t = spans_table.c
    given = query.__dict__
    conditions = [t[name] == given[name] for name in _SPAN_FILTERS if given[name] is not None]
    conditions += [
        _contains(t[name], text) for name in _SPAN_FILTERS if (text := given[f"{name}_contains"]) is not None
    ]
    scope: list[ColumnElement[bool]] = [t.rollout_id == query.rollout_id]
    if query.attempt_id == "latest":
        latest = select(rollouts_table.c.latest_attempt_id).where(rollouts_table.c.rollout_id == query.rollout_id)
        scope.append(t.attempt_id == latest.scalar_subquery())
    elif query.attempt_id is not None:
        scope.append(t.attempt_id == query.attempt_id)
    statement = select(*SPAN_COLUMNS).where(*scope, *_combine(conditions, query.filter_logic))
    page = _page(tx, spans_table, statement, Page(query), _SPAN_SORTS, tuple[Any, ...])
    return PaginatedResult.model_construct(
        **{**page.__dict__, "items": [to_span(row) for row in whole(tx, page.items)]}
    )


def query_resources(tx: Transaction, query: ResourcesQuery) -> PaginatedResult[ResourcesUpdate]:
    t = resources_table.c
    conditions: list[ColumnElement[bool]] = []
    if query.resources_id is not None:
        conditions.append(t.resources_id == query.resources_id)
    if query.resources_id_contains is not None:
        conditions.append(_contains(t.resources_id, query.resources_id_contains))
    statement = select(*resources.RESOURCES_COLUMNS).where(*conditions)
    return _page(tx, resources_table, statement, Page(query), _RESOURCES_SORTS, resources.to_update)


def query_workers(tx: Transaction, query: WorkerQuery) -> PaginatedResult[Worker]:
    t = workers_table.c
    conditions: list[ColumnElement[bool]] = []
    if query.status_in is not None:
        conditions.append(t.status.in_([status.value for status in query.status_in]))
    if query.worker_id_contains is not None:
        conditions.append(_contains(t.worker_id, query.worker_id_contains))
    statement = select(*workers.WORKER_COLUMNS).where(*_combine(conditions, query.filter_logic))
    return _page(tx, workers_table, statement, Page(query), _WORKER_SORTS, workers.to_worker)


_RUN_SORTS = ("run_id", "algorithm", "agent", "status", "start_time", "end_time")
_EVENT_SORTS = ("event_id", "kind", "time", "step")


def query_runs(tx: Transaction, query: RunQuery) -> PaginatedResult[Run]:
    t = runs_table.c
    conditions: list[ColumnElement[bool]] = []
    if query.status_in is not None:
        conditions.append(t.status.in_([status.value for status in query.status_in]))
    if query.run_id_contains is not None:
        conditions.append(_contains(t.run_id, query.run_id_contains))
    statement = select(*runs.RUN_COLUMNS).where(*conditions)
    return _page(tx, runs_table, statement, Page(query), _RUN_SORTS, runs.to_run)


def query_run_events(tx: Transaction, run_id: str, query: RunEventQuery) -> PaginatedResult[RunEvent]:
    t = events_table.c
    scope = [t.run_id == run_id]
    if query.kind_in is not None:
        scope.append(t.kind.in_(query.kind_in))
    if query.step_min is not None:
        scope.append(t.step >= query.step_min)
    statement = select(*runs.EVENT_COLUMNS).where(*scope)
    return _page(tx, events_table, statement, Page(query), _EVENT_SORTS, runs.to_event)


class RecordTable(NamedTuple):
    """What `RolloutRecord`s are made from, in a smaller form for a wire."""

    rollouts: list[AttemptedRollout | Rollout]
    spans: list[Span]
    calls: calls.CallTable


def fetch(tx: Transaction, rollout_ids: Sequence[str]) -> RecordTable:
    """The rollouts that exist among these, in the order asked for. Four queries, however many they are."""
    found = rollouts.read_many(tx, list(dict.fromkeys(rollout_ids)))
    return RecordTable(list(found.values()), _telling_spans(tx, list(found)), calls.fetch(tx, list(found), True))


def _telling_spans(tx: Transaction, rollout_ids: Sequence[str]) -> list[Span]:
    """Spans of latest attempts that carry a reward, a triplet, or the refusal of a request, in their order."""
    t = spans_table.c
    patterns = (f'"{REWARD}.', '"error.type":"refused"')
    outputs = or_(*(t.attributes.contains(f'"{key}"', autoescape=True) for key in AGENTOPS_OUTPUTS))
    tells = or_(
        t.name.in_((TRIPLET, REWARD)),
        *(t.attributes.contains(words, autoescape=True) for words in patterns),
        and_(outputs, t.attributes.contains("reward")),
    )
    statement = (
        select(*SPAN_COLUMNS)
        .join_from(spans_table, rollouts_table, rollouts_table.c.latest_attempt_id == t.attempt_id)
        .order_by(t.sequence_id, t.seq)
    )
    found: list[Span] = []
    for start in range(0, len(rollout_ids), IDS_PER_QUERY):
        chosen = t.rollout_id.in_(rollout_ids[start : start + IDS_PER_QUERY])
        found += [to_span(row) for row in whole(tx, tx.select(statement.where(chosen, tells)))]
    return found


def assemble(table: RecordTable) -> list[RolloutRecord]:
    spans_of: defaultdict[str, list[Span]] = defaultdict(list)
    for span in table.spans:
        spans_of[span.rollout_id].append(span)
    calls_of = calls.assemble(table.calls, [rollout.rollout_id for rollout in table.rollouts])
    return [RolloutRecord(r, calls_of[r.rollout_id], spans_of[r.rollout_id]) for r in table.rollouts]
