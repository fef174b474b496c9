"""What is asked again and again of many rollouts costs little: counted in statements and objects, not by a clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentlightning.store import InMemoryLightningStore
from agentlightning.store.database.sqlite import SqliteTransaction
from agentlightning.store.operations import rollouts
from agentlightning.types import AttemptStatus, EnqueueRolloutRequest

MANY = 300


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    opened = InMemoryLightningStore()
    yield opened
    await opened.close()


async def test_who_waits_for_many_rollouts_has_only_the_finished_ones_read(
    store: InMemoryLightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    to_either = rollouts.to_either

    def counted(row: Any) -> Any:
        made.append(row[0])
        return to_either(row)

    ids = [
        r.rollout_id for r in await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(MANY)])
    ]
    (claim,) = await store.dequeue_many_rollouts(1)
    await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status=AttemptStatus.SUCCEEDED)
    monkeypatch.setattr(rollouts, "to_either", counted)
    found = await store.wait_for_any_rollout(rollout_ids=ids)
    assert [r.rollout_id for r in found] == made == [claim.rollout_id]


async def test_a_claim_under_many_ids_reads_them_at_once(
    store: InMemoryLightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements: list[Any] = []
    row = SqliteTransaction.row

    def counted(self: SqliteTransaction, statement: Any, parameters: Any) -> Any:
        statements.append(statement)
        return row(self, statement, parameters)

    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(3)])
    ids = [f"a{n}" for n in range(MANY)]
    monkeypatch.setattr(SqliteTransaction, "row", counted)
    claims = await store.dequeue_many_rollouts(MANY, "w", attempt_ids=ids)
    assert [claim.attempt.attempt_id for claim in claims] == ids[:3]
    assert len(statements) < 30  # of a claim's own, not one for each id
    again = await store.dequeue_many_rollouts(MANY, "w", attempt_ids=ids)
    assert [claim.attempt.attempt_id for claim in again] == ids[:3]
