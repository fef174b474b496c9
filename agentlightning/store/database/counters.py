"""Counters: how many rollouts and attempts are in each status, kept by the writer so that nobody has to count.

A transaction's changes are written once, at its end. Each writing process has rows of its own (`shard`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from sqlalchemy import func, select

from agentlightning.store.base import Statistics
from agentlightning.store.database.schema import counters
from agentlightning.store.database.transaction import Statement, Transaction
from agentlightning.types import AttemptStatus, RolloutStatus


def _upsert_statement(insert):  # the dialect's insert
    statement = insert(counters)
    return statement.on_conflict_do_update(
        index_elements=["name", "shard"], set_={"value": counters.c.value + statement.excluded.value}
    )


_upsert = Statement(_upsert_statement, ["name", "shard", "value"])
_select = Statement(select(counters.c.name, func.sum(counters.c.value)).group_by(counters.c.name))


def write_counters(tx: Transaction, shard: str, deltas: Mapping[str, int]) -> None:
    rows = [{"name": name, "shard": shard, "value": delta} for name, delta in deltas.items() if delta]
    if rows:
        tx.many(_upsert, rows)


def read_counters(tx: Transaction) -> defaultdict[str, int]:
    values: defaultdict[str, int] = defaultdict(int)
    for name, value in tx.rows(_select, {}):
        values[name] = int(value)
    return values


def statistics(tx: Transaction, name: str, uptime: float) -> Statistics:
    values = read_counters(tx)
    rollouts = {status.value: values[f"rollouts.{status.value}"] for status in RolloutStatus}
    attempts = {status.value: values[f"attempts.{status.value}"] for status in AttemptStatus}
    return Statistics(
        name=name,
        rollouts=rollouts,
        attempts=attempts,
        total_rollouts=sum(rollouts.values()),
        total_attempts=sum(attempts.values()),
        total_spans=values["spans"],
        total_calls=values["calls"],
        total_resources=values["resources"],
        total_workers=values["workers"],
        uptime_seconds=uptime,
        uptime=uptime,
    )
