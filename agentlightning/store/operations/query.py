"""Queries with filters, sorting and pages, over every table a user may search.

The order of insertion is the default order, and also what sorting by a start time means: both only ever grow, and the
first is the primary key, so first pages stay fast however large a table becomes.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Column, ColumnElement, Select, Table, and_, func, literal, or_, select, tuple_

from agentlightning.errors import StoreError
from agentlightning.store.base import FilterLogic, SortOrder
from agentlightning.store.database.counters import read_counters
from agentlightning.store.database.schema import attempts as attempts_table
from agentlightning.store.database.schema import resources as resources_table
from agentlightning.store.database.schema import rollouts as rollouts_table
from agentlightning.store.database.schema import spans as spans_table
from agentlightning.store.database.schema import workers as workers_table
from agentlightning.store.database.transaction import Row, Transaction
from agentlightning.store.operations import resources, workers
from agentlightning.store.operations.attempts import ATTEMPT_COLUMNS
from agentlightning.store.operations.codec import to_attempt, to_rollout
from agentlightning.store.operations.rollouts import ROLLOUT_COLUMNS
from agentlightning.store.operations.spans import SPAN_COLUMNS, to_span
from agentlightning.types import Attempt, PaginatedResult, ResourcesUpdate, Rollout, RolloutStatus, Span, Worker

T = TypeVar("T")


class Page:
    """Which part of an answer, in which order. `limit=-1` means no limit.

    A `cursor` says where the page before ended: the value it was sorted by and the row's number. What follows is
    found by index however far it is, and rows that come or go meanwhile shift nothing.
    """

    __slots__ = ("after", "limit", "offset", "sort_by", "sort_order")

    def __init__(self, sort_by: str | None, sort_order: SortOrder, limit: int, offset: int, cursor: str | None = None):
        if limit < -1 or offset < 0:
            raise StoreError(f"limit must be -1 (all) or more and offset 0 or more, not {limit} and {offset}.")
        if sort_order not in ("asc", "desc"):
            raise StoreError(f"sort_order must be 'asc' or 'desc', not '{sort_order}'.")
        if cursor is not None and offset:
            raise StoreError("Give a cursor or an offset, not both.")
        self.sort_by, self.sort_order, self.limit, self.offset = sort_by, sort_order, limit, offset
        self.after = None if cursor is None else self._decode(cursor)

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
    nullable = [column.name for column in columns if isinstance(column, Column) and column.nullable]
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


_ROLLOUT_SORTS = ("rollout_id", "start_time", "end_time", "mode", "status", "resources_id")
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


def query_rollouts(
    tx: Transaction,
    status_in: Sequence[RolloutStatus] | None,
    rollout_id_in: Sequence[str] | None,
    rollout_id_contains: str | None,
    logic: FilterLogic,
    page: Page,
) -> PaginatedResult[Rollout]:
    t = rollouts_table.c
    statuses = None if status_in is None else [RolloutStatus(status).value for status in status_in]
    conditions: list[ColumnElement[bool]] = []
    if statuses is not None:
        conditions.append(t.status.in_(statuses))
    if rollout_id_in is not None:
        conditions.append(t.rollout_id.in_(list(rollout_id_in)))
    if rollout_id_contains is not None:
        conditions.append(_contains(t.rollout_id, rollout_id_contains))
    statement = select(*ROLLOUT_COLUMNS).where(*_combine(conditions, logic))
    counted = rollout_id_in is None and rollout_id_contains is None
    total = (lambda: _total(tx, statuses)) if counted else None
    return _page(tx, rollouts_table, statement, page, _ROLLOUT_SORTS, to_rollout, total)


def _total(tx: Transaction, statuses: Sequence[str] | None) -> int:
    """How many rollouts there are in these statuses, from the counters."""
    chosen = [status.value for status in RolloutStatus] if statuses is None else set(statuses)
    values = read_counters(tx)
    return sum(values[f"rollouts.{status}"] for status in chosen)


def query_attempts(tx: Transaction, rollout_id: str, page: Page) -> PaginatedResult[Attempt]:
    statement = select(*ATTEMPT_COLUMNS).where(attempts_table.c.rollout_id == rollout_id)
    return _page(tx, attempts_table, statement, page, _ATTEMPT_SORTS, to_attempt)


def query_spans(
    tx: Transaction,
    rollout_id: str,
    attempt_id: str | None,
    equals: Mapping[str, str | None],
    contains: Mapping[str, str | None],
    logic: FilterLogic,
    page: Page,
) -> PaginatedResult[Span]:
    """`attempt_id` is None for all attempts, or "latest"."""
    t = spans_table.c
    conditions = [t[name] == value for name, value in equals.items() if value is not None]
    conditions += [_contains(t[name], value) for name, value in contains.items() if value is not None]
    scope: list[ColumnElement[bool]] = [t.rollout_id == rollout_id]
    if attempt_id == "latest":
        latest = select(rollouts_table.c.latest_attempt_id).where(rollouts_table.c.rollout_id == rollout_id)
        scope.append(t.attempt_id == latest.scalar_subquery())
    elif attempt_id is not None:
        scope.append(t.attempt_id == attempt_id)
    statement = select(*SPAN_COLUMNS).where(*scope, *_combine(conditions, logic))
    return _page(tx, spans_table, statement, page, _SPAN_SORTS, to_span)


def query_resources(
    tx: Transaction, resources_id: str | None, resources_id_contains: str | None, page: Page
) -> PaginatedResult[ResourcesUpdate]:
    t = resources_table.c
    conditions: list[ColumnElement[bool]] = []
    if resources_id is not None:
        conditions.append(t.resources_id == resources_id)
    if resources_id_contains is not None:
        conditions.append(_contains(t.resources_id, resources_id_contains))
    statement = select(*resources.RESOURCES_COLUMNS).where(*conditions)
    return _page(tx, resources_table, statement, page, _RESOURCES_SORTS, resources.to_update)


def query_workers(
    tx: Transaction,
    status_in: Sequence[str] | None,
    worker_id_contains: str | None,
    logic: FilterLogic,
    page: Page,
) -> PaginatedResult[Worker]:
    t = workers_table.c
    conditions: list[ColumnElement[bool]] = []
    if status_in is not None:
        conditions.append(t.status.in_([str(status) for status in status_in]))
    if worker_id_contains is not None:
        conditions.append(_contains(t.worker_id, worker_id_contains))
    statement = select(*workers.WORKER_COLUMNS).where(*_combine(conditions, logic))
    return _page(tx, workers_table, statement, page, _WORKER_SORTS, workers.to_worker)
