"""Forgetting: deleting finished rollouts with everything that belongs to them, a few at a time.

Unfinished rollouts, resources and workers are never deleted, but for recordings that no rollout is a fork by any more.
The file does not shrink; its space is used again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, func, select

from agentlightning.store.database.schema import attempts, calls, resources, rollouts, segments, spans
from agentlightning.store.database.transaction import Transaction
from agentlightning.store.operations.calls import shared_tokens
from agentlightning.store.operations.spans import shared_texts
from agentlightning.types.status import FINISHED_ROLLOUT

BATCH = 200
"""Rollouts per transaction, so that other writers wait for milliseconds only."""


def prune(tx: Transaction, finished_before: float | None, keep: int | None) -> int:
    """Delete up to `BATCH` rollouts that finished before a time, or are not among the `keep` last finished ones."""
    finished = rollouts.c.status.in_([status.value for status in FINISHED_ROLLOUT])
    chosen: list[Any] = []
    if finished_before is not None:
        oldest = select(rollouts.c.rollout_id).where(finished, rollouts.c.end_time < finished_before)
        chosen = tx.select(oldest.order_by(rollouts.c.seq).limit(BATCH))
    if keep is not None and len(chosen) < BATCH:
        ((count,),) = tx.select(select(func.count()).select_from(rollouts).where(finished))
        excess = min(count - keep - len(chosen), BATCH - len(chosen))
        if excess > 0:
            oldest = select(rollouts.c.rollout_id).where(finished).order_by(rollouts.c.seq)
            chosen += tx.select(oldest.offset(len(chosen)).limit(excess))
    ids = list(dict.fromkeys(row[0] for row in chosen))
    if ids:
        _delete(tx, ids)
    return len(ids)


def _delete(tx: Transaction, rollout_ids: Sequence[str]) -> None:
    used = tx.select(select(rollouts.c.resources_id).where(rollouts.c.rollout_id.in_(rollout_ids)).distinct())
    gone = tx.select(select(attempts.c.attempt_id, attempts.c.status).where(attempts.c.rollout_id.in_(rollout_ids)))
    statuses = tx.select(select(rollouts.c.status).where(rollouts.c.rollout_id.in_(rollout_ids)))
    for noun, values in (("rollouts", [row[0] for row in statuses]), ("attempts", [row[1] for row in gone])):
        for status, count in Counter(values).items():
            tx.changes.counts[f"{noun}.{status}"] -= count
    attempt_ids = [row[0] for row in gone]
    shared_texts.hand_over(tx, attempt_ids, spans.c.rollout_id.in_(rollout_ids))
    shared_tokens.hand_over(tx, attempt_ids, segments.c.attempt_id.in_(attempt_ids))
    tx.changes.counts["spans"] -= tx.change(delete(spans).where(spans.c.rollout_id.in_(rollout_ids)))
    tx.changes.counts["calls"] -= tx.change(delete(calls).where(calls.c.rollout_id.in_(rollout_ids)))
    tx.change(delete(segments).where(segments.c.attempt_id.in_(attempt_ids)))
    tx.change(delete(attempts).where(attempts.c.rollout_id.in_(rollout_ids)))
    tx.change(delete(rollouts).where(rollouts.c.rollout_id.in_(rollout_ids)))
    _delete_recordings(tx, [row[0] for row in used if row[0] is not None])


def _delete_recordings(tx: Transaction, resources_ids: Sequence[str]) -> None:
    """Delete the resources that hold a recording and belong to no rollout; the latest of all stays in any case."""
    holds = resources.c.resources.like('%"resource_type":"recording"%')
    found = tx.select(select(resources.c.resources_id).where(resources.c.resources_id.in_(resources_ids), holds))
    if ids := [row[0] for row in found]:
        left = select(rollouts.c.resources_id).where(rollouts.c.resources_id.in_(ids))
        latest = select(func.max(resources.c.revision)).scalar_subquery()
        unused = resources.c.resources_id.in_(ids), resources.c.resources_id.not_in(left)
        tx.change(delete(resources).where(*unused, resources.c.revision != latest))
