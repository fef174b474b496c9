"""Queries with filters, sorting and pages, over every table a user may search.

The order of insertion is the default order, and also what sorting by a start time means: both only ever grow, and the
first is the primary key, so first pages stay fast however large a table becomes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Select, Table, and_, func, or_, select

from agentlightning.errors import StoreError
from agentlightning.store import resources, workers
from agentlightning.store.attempts import ATTEMPT_COLUMNS
from agentlightning.store.base import FilterLogic, SortOrder
from agentlightning.store.codec import to_attempt, to_rollout
from agentlightning.store.counters import read_counters
from agentlightning.store.rollouts import ROLLOUT_COLUMNS
from agentlightning.store.schema import attempts as attempts_table
from agentlightning.store.schema import resources as resources_table
from agentlightning.store.schema import rollouts as rollouts_table
from agentlightning.store.schema import spans as spans_table
from agentlightning.store.schema import workers as workers_table
from agentlightning.store.spans import SPAN_COLUMNS, to_span
from agentlightning.store.transaction import Row, Transaction
from agentlightning.types import Attempt, PaginatedResult, ResourcesUpdate, Rollout, RolloutStatus, Span, Worker

T = TypeVar("T")


class Page:
    """Which part of an answer, in which order. `limit=-1` means no limit."""

    __slots__ = ("limit", "offset", "sort_by", "sort_order")

    def __init__(self, sort_by: str | None, sort_order: SortOrder, limit: int, offset: int):
        if limit < -1 or offset < 0:
            raise StoreError(f"limit must be -1 (all) or more and offset 0 or more, not {limit} and {offset}.")
        if sort_order not in ("asc", "desc"):
            raise StoreError(f"sort_order must be 'asc' or 'desc', not '{sort_order}'.")
        self.sort_by, self.sort_order, self.limit, self.offset = sort_by, sort_order, limit, offset


def _contains(column: ColumnElement[Any], text: str) -> ColumnElement[bool]:
    return column.contains(text, autoescape=True)


def _combine(conditions: Sequence[ColumnElement[bool]], logic: FilterLogic) -> list[ColumnElement[bool]]:
    if len(conditions) < 2:
        return list(conditions)
    return [or_(*conditions) if logic == "or" else and_(*conditions)]


def _order(table: Table, page: Page, allowed: Sequence[str]) -> list[ColumnElement[Any]]:
    name = page.sort_by
    if name is not None and name not in allowed:
        raise StoreError(f"Cannot sort by '{name}'; choose one of {', '.join(sorted(allowed))}.")
    columns = [] if name in (None, "start_time", "create_time") else [table.c[name]]
    columns.append(table.c.seq)
    return [column.desc() if page.sort_order == "desc" else column.asc() for column in columns]


def _page(
    tx: Transaction,
    statement: Select[Any],
    page: Page,
    make: Callable[[Row], T],
    total: Callable[[], int] | None = None,
) -> PaginatedResult[T]:
    """Run a query; the total is counted only where the page itself does not show it."""
    paged = statement
    if page.limit >= 0:
        paged = paged.limit(page.limit)
    if page.offset:
        # SQLite knows OFFSET only after a LIMIT.
        paged = paged.limit(page.limit if page.limit >= 0 else 2**62).offset(page.offset)
    rows = tx.select(paged)
    if page.limit < 0 or 0 < len(rows) < page.limit:
        count = page.offset + len(rows) if rows or not page.offset else _count(tx, statement)
    elif total is not None:
        count = total()
    else:
        count = _count(tx, statement)
    return PaginatedResult.model_construct(
        items=[make(row) for row in rows], limit=page.limit, offset=page.offset, total=count
    )


def _count(tx: Transaction, statement: Select[Any]) -> int:
    counted = statement.order_by(None).with_only_columns(func.count(), maintain_column_froms=True)
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
    statement = statement.order_by(*_order(rollouts_table, page, _ROLLOUT_SORTS))
    counted = rollout_id_in is None and rollout_id_contains is None
    return _page(tx, statement, page, to_rollout, (lambda: _total(tx, statuses)) if counted else None)


def _total(tx: Transaction, statuses: Sequence[str] | None) -> int:
    """How many rollouts there are in these statuses, from the counters."""
    chosen = [status.value for status in RolloutStatus] if statuses is None else set(statuses)
    values = read_counters(tx)
    return sum(values[f"rollouts.{status}"] for status in chosen)


def query_attempts(tx: Transaction, rollout_id: str, page: Page) -> PaginatedResult[Attempt]:
    statement = select(*ATTEMPT_COLUMNS).where(attempts_table.c.rollout_id == rollout_id)
    return _page(tx, statement.order_by(*_order(attempts_table, page, _ATTEMPT_SORTS)), page, to_attempt)


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
    return _page(tx, statement.order_by(*_order(spans_table, page, _SPAN_SORTS)), page, to_span)


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
    statement = statement.order_by(*_order(resources_table, page, _RESOURCES_SORTS))
    return _page(tx, statement, page, resources.to_update)


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
    return _page(tx, statement.order_by(*_order(workers_table, page, _WORKER_SORTS)), page, workers.to_worker)
