"""Rollouts found by what they are of and what they earned: the columns, the filters, the pages, and older stores."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from alembic import command

from agentlightning.store import LightningStore, SqliteLightningStore
from agentlightning.store.database.migrate import alembic_config
from agentlightning.store.database.transaction import Transaction
from agentlightning.store.operations import spans as span_rows
from agentlightning.types import AttemptStatus, Outcome, RolloutMode, Run
from agentlightning.types.names import REWARD, REWARD_AGENT, REWARD_RESPONSE
from agentlightning.types.reward import reward_attributes
from tests.store.builders import make_call, make_segment, make_span


async def finished(
    store: LightningStore,
    task: Any,
    *rewards: dict[str, Any],
    outcome: Outcome = Outcome.OK,
    span: str = "reward",
    **given: Any,
) -> str:
    claim = await store.start_rollout(task, worker_id="w", **given)
    for attributes in rewards:
        await store.add_span(make_span(claim, span, **attributes))
    status = AttemptStatus.SUCCEEDED if outcome is Outcome.OK else AttemptStatus.FAILED
    await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status=status, outcome=outcome)
    return claim.rollout_id


async def found(store: LightningStore, **query: Any) -> list[Any]:
    return [rollout.input for rollout in await store.query_rollouts(**query)]


@pytest.mark.contract
async def test_rollouts_are_found_by_what_they_are_of(store: LightningStore) -> None:
    await finished(store, "a", reward_attributes(1.0), run_id="r", metadata={"step": 1, "group": "1-0"})
    await finished(store, "b", reward_attributes(0.5), run_id="r", metadata={"step": 2, "group": 7})
    await finished(store, "c", run_id="r", mode=RolloutMode.VAL, outcome=Outcome.AGENT_ERROR)
    await finished(store, "needle_% and more", reward_attributes(0.25), run_id="s", metadata={"step": True})
    assert await found(store, step_in=[1, 2]) == ["a", "b"]
    assert await found(store, group_in=["7"]) == ["b"]
    assert await found(store, mode_in=[RolloutMode.VAL]) == ["c"]
    assert await found(store, outcome_in=[Outcome.AGENT_ERROR]) == ["c"]
    assert await found(store, reward_min=0.5) == ["a", "b"]
    assert await found(store, reward_max=0.5, run_id_in=["r"]) == ["b"]
    assert await found(store, text_contains="needle_%") == ["needle_% and more"]
    assert await found(store, sort_by="reward", sort_order="desc") == ["a", "b", "needle_% and more"]
    first = await store.query_rollouts(sort_by="reward", limit=1)
    assert await found(store, sort_by="reward", limit=1, cursor=first.next_cursor) == ["b"]


EARNED: list[tuple[list[dict[str, Any]], float | None]] = [
    ([reward_attributes(0.1), reward_attributes(0.9)], 0.9),
    ([reward_attributes(0.1), {**reward_attributes(0.95), REWARD_RESPONSE: "x"}], 0.1),
    ([{**reward_attributes(0.2), REWARD_AGENT: "x"}, {**reward_attributes(0.4), REWARD_AGENT: "y"}], 0.3),
    ([{"agentlightning.reward.0.value": "nan"}], None),
    ([], None),
    ([{"agentops.task.output": json.dumps({"type": "reward", "value": 0.5})}], 0.5),
    ([{"agentops.entity.output": json.dumps({"type": "reward", "value": 0.6})}], 0.6),
    ([{"agentops.task.output": json.dumps({"type": "text", "value": 1})}, reward_attributes(0.7)], 0.7),
    ([{"agentops.task.output": "no JSON"}], None),
    ([{"reward": 0.8}], 0.8),
    ([{"note": "an agent that writes agentlightning.reward.0.value into a text"}], None),
]
"""What spans say, and the reward that it comes to; 0.2 wrote it as an attribute of the span of that name."""


async def test_what_a_rollout_earned_is_noted(store: LightningStore) -> None:
    """Read by the database: SQLite's SQL, PostgreSQL's, and over HTTP."""
    for number, (rewards, _) in enumerate(EARNED):
        await finished(store, f"task {number}", *rewards, span=REWARD)
    expected = sorted((reward, f"task {number}") for number, (_, reward) in enumerate(EARNED) if reward is not None)
    assert await found(store, sort_by="reward", sort_order="asc") == [task for _, task in expected]
    for reward, task in expected:
        assert await found(store, reward_min=reward - 1e-9, reward_max=reward + 1e-9) == [task]


async def test_the_weights_of_its_run_and_who_is_trained_are_known(store: LightningStore) -> None:
    """Looked up by every database, and over HTTP."""
    await store.begin_run(Run(run_id="r", algorithm="GRPO", agent="a", settings={"reward_weights": {"x": 1, "y": 0.5}}))
    parts = reward_attributes({"x": 1.0, "y": 0.5}, primary_key="x")
    await finished(store, "weighed", parts, run_id="r")
    await finished(store, "of no run", parts)
    claim = await store.start_rollout("one is frozen", worker_id="w")
    for number, trained in enumerate((True, False)):
        ids = make_segment(f"p{number}", None, 0, [1]), make_segment(f"r{number}", f"p{number}", 1, [2], version=0)
        call = make_call(claim, f"c{number}", f"p{number}", f"r{number}", *ids)
        await store.add_calls([replace(call, info=replace(call.info, agent="ab"[number], trained=trained))])
        given = reward_attributes(float(number)) | {REWARD_AGENT: "ab"[number]}
        await store.add_span(make_span(claim, REWARD, **given))
    await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status=AttemptStatus.SUCCEEDED)
    assert await found(store, sort_by="reward", sort_order="asc") == ["one is frozen", "of no run", "weighed"]
    for reward, task in ((0.0, "one is frozen"), (1.0, "of no run"), (1.25, "weighed")):
        assert await found(store, reward_min=reward, reward_max=reward) == [task]


async def test_a_reward_that_comes_late_counts_and_one_of_an_earlier_attempt_does_not(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    claim = await store.start_rollout("task", worker_id="w")
    where = claim.rollout_id, claim.attempt.attempt_id
    await store.update_attempt(*where, status=AttemptStatus.SUCCEEDED, outcome=Outcome.TRUNCATED)
    assert [one.reward for one in await store.list_rollouts()] == [0.0]
    await store.add_span(make_span(claim, "late", **reward_attributes(0.75)))
    assert [one.reward for one in await store.list_rollouts()] == [0.75]
    await store.close()


@pytest.mark.contract
async def test_rewards_that_come_late_one_by_one_come_to_the_same(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    for number, (rewards, expected) in enumerate(EARNED):
        for before in range(len(rewards) + 1):
            claim = await store.start_rollout((number, before), worker_id="w")
            ended = claim.rollout_id, claim.attempt.attempt_id
            for place, attributes in enumerate(rewards):
                if place == before:
                    await store.update_attempt(*ended, status=AttemptStatus.SUCCEEDED)
                await store.add_span(make_span(claim, REWARD, **attributes))
            if before == len(rewards):
                await store.update_attempt(*ended, status=AttemptStatus.SUCCEEDED)
            (one,) = await store.list_rollouts(rollout_id_in=[claim.rollout_id])
            assert one.reward == (None if expected is None else pytest.approx(expected)), (number, before)
    await store.close()


async def test_a_late_reward_with_a_lower_number_is_not_the_last(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    claim = await store.start_rollout("task", worker_id="w")
    await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status=AttemptStatus.SUCCEEDED)
    for number, reward, known in ((7, 0.7, 0.7), (3, 0.3, 0.7), (7, 0.8, 0.8), (0, 0.9, 0.9)):
        span = make_span(claim, REWARD, **reward_attributes(reward)).model_copy(update={"sequence_id": number})
        await store.add_span(span)
        assert [one.reward for one in await store.list_rollouts()] == [known]
    await store.close()


class Counting:
    """A transaction that counts the rows it reads."""

    def __init__(self, tx: Any) -> None:
        self._tx = tx
        self.read = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tx, name)

    def rows(self, *given: Any) -> list[Any]:
        found = self._tx.rows(*given)
        self.read += len(found)
        return found


@pytest.mark.parametrize("late", [{"note": "no reward"}, reward_attributes(0.75)])
async def test_a_late_span_costs_no_more_for_those_before_it(tmp_path: Path, late: dict[str, Any]) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    claim = await store.start_rollout("task", worker_id="w")
    await store.add_many_spans([make_span(claim, REWARD, **reward_attributes(0.5)) for _ in range(300)])
    await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status=AttemptStatus.SUCCEEDED)

    def add(tx: Transaction) -> int:
        counting = Counting(tx)
        span_rows.add(cast(Transaction, counting), [span_rows.to_values(make_span(claim, "late", **late))])
        return counting.read

    assert [await store._db.write(add) for _ in range(3)] == [1, 1, 1]  # the attempt itself
    assert [one.reward for one in await store.list_rollouts()] == [0.75 if "note" not in late else 0.5]
    await store.close()


async def test_lists_are_short_and_counted_apart(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    for number in range(7):
        await finished(store, "x" * 5000, run_id="r", metadata={"step": number})
    page = await store.list_rollouts(limit=3, sort_by="step")
    assert ([one.step for one in page], page.total) == ([0, 1, 2], -1)
    assert max(len(one.task) for one in page) == 2000
    rest = await store.list_rollouts(limit=30, sort_by="step", cursor=page.next_cursor)
    assert [one.step for one in rest] == [3, 4, 5, 6]
    assert await store.count_rollouts(run_id_in=["r"]) == 7
    assert await store.count_rollouts(5, run_id_in=["r"]) == 5
    await store.close()


async def test_the_place_of_a_rollout_follows_its_metadata(store: LightningStore) -> None:
    rollout = await store.enqueue_rollout("task", metadata={"step": 1, "group": "a"})
    await store.update_rollout(rollout.rollout_id, metadata={"step": 5})
    assert await found(store, step_in=[5]) == ["task"]
    assert await found(store, group_in=["a"]) == []


async def test_an_older_store_learns_what_its_rollouts_are_found_by(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SqliteLightningStore(path)
    await finished(store, "task", reward_attributes(0.5), run_id="r", metadata={"step": 3, "group": "3-1"})
    await store.close()
    command.downgrade(alembic_config(f"sqlite:///{path}"), "0002")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert "reward" not in {row[1] for row in connection.execute("PRAGMA table_info(rollouts)")}
    store = SqliteLightningStore(path)
    (listed,) = await store.list_rollouts()
    assert (listed.step, listed.group, listed.reward) == (3, "3-1", 0.5)
    await store.close()
