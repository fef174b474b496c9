"""Runs in the store: a run is data, and several runs in one store never take each other's work."""

from __future__ import annotations

import asyncio

import pytest

from agentlightning.errors import NotFoundError
from agentlightning.store import LightningStore
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, Run, RunEvent, RunStatus
from tests.store.builders import make_call, make_segment, make_span


def event(event_id: str, kind: str = "note", step: int | None = None, run_id: str = "a", **data: object) -> RunEvent:
    return RunEvent.model_validate(
        {"run_id": run_id, "event_id": event_id, "kind": kind, "time": 1.5, "step": step, "data": data}
    )


@pytest.mark.contract
async def test_a_run_is_read_back_as_it_was_told(store: LightningStore) -> None:
    begun = await store.begin_run(Run(run_id="a", algorithm="GRPO", agent="calc", settings={"lr": 1e-5, "n": None}))
    assert begun.status is RunStatus.RUNNING
    assert begun.start_time > 0
    assert begun.end_time is None
    await store.update_run("a", state={"doing": "sampling", "step": 3})
    await store.update_run("a", state={"step": 4})
    ended = await store.update_run("a", status=RunStatus.FAILED, error="the disk \ud800is full")
    assert ended.end_time is not None
    found = await store.get_run_by_id("a")
    assert found is not None
    assert found.state == {"doing": "sampling", "step": 4}
    assert found.settings == {"lr": 1e-5, "n": None}
    assert found.error == "the disk ?is full"
    assert await store.get_run_by_id("b") is None
    with pytest.raises(NotFoundError, match="'b'"):
        await store.update_run("b", status=RunStatus.STOPPED)
    with pytest.raises(NotFoundError, match="'b'"):
        await store.add_run_events([event("1", run_id="b")])


async def test_what_a_run_said_is_stored_once_and_read_by_kind(store: LightningStore) -> None:
    await store.begin_run(Run(run_id="a"))
    events = [event("note-1", text="one"), event("step-0", "step", 0, reward=0.5), event("step-1", "step", 1)]
    await store.add_run_events(events)
    await store.add_run_events([*events, event("note-2", "warning", text="\ud83d half")])
    assert [e.event_id for e in await store.query_run_events("a")] == ["note-1", "step-0", "step-1", "note-2"]
    steps = await store.query_run_events("a", kind_in=["step"], sort_by="step", sort_order="desc", limit=1)
    assert (steps[0].step, steps[0].data, steps.total) == (1, {}, 2)
    (warning,) = await store.query_run_events("a", kind_in=["warning"])
    assert warning.data == {"text": "? half"}


async def test_a_resumed_run_forgets_the_steps_that_it_does_again(store: LightningStore) -> None:
    await store.begin_run(Run(run_id="a", settings={"n": 1}))
    await store.add_run_events([event(f"step-{n}", "step", n, life=1) for n in range(4)])
    await store.add_run_events([event("said", text="before")])
    await store.update_run("a", status=RunStatus.FAILED, error="killed")
    again = await store.begin_run(Run(run_id="a", settings={"n": 2}), first_step=2)
    assert (again.status, again.error, again.end_time, again.settings) == (RunStatus.RUNNING, None, None, {"n": 2})
    await store.add_run_events([event("step-2", "step", 2, life=2)])
    found = await store.query_run_events("a", kind_in=["step"])
    assert [(e.step, e.data["life"]) for e in found] == [(0, 1), (1, 1), (2, 2)]
    assert len(await store.query_run_events("a", kind_in=["note"])) == 1


async def test_runs_are_found_by_status(store: LightningStore) -> None:
    for run_id in ("a", "b", "c"):
        await store.begin_run(Run(run_id=run_id))
    await store.update_run("b", status=RunStatus.SUCCEEDED)
    assert [run.run_id for run in await store.query_runs(status_in=[RunStatus.RUNNING])] == ["a", "c"]
    assert [run.run_id for run in await store.query_runs(run_id_contains="b")] == ["b"]


@pytest.mark.contract
async def test_runners_of_one_run_never_claim_rollouts_of_another(store: LightningStore) -> None:
    """Two runs in one store at the same time, with a waiting runner each, and one that takes anything."""
    requests = [EnqueueRolloutRequest(input=n, run_id="ab"[n % 2]) for n in range(20)]

    async def runner(run_id: str) -> list[AttemptedRollout]:
        claimed: list[AttemptedRollout] = []
        while claim := await store.dequeue_rollout(f"w-{run_id}", timeout=20.0, run_id=run_id):
            claimed.append(claim)
            if len(claimed) == 10:
                break
        return claimed

    waiting = [asyncio.create_task(runner(run_id)) for run_id in "ab"]
    await asyncio.sleep(0.1)
    for request in requests:
        await store.enqueue_many_rollouts([request])
    for run_id, claimed in zip("ab", await asyncio.gather(*waiting), strict=True):
        assert {claim.run_id for claim in claimed} == {run_id}
    assert [r.run_id for r in await store.query_rollouts(run_id_in=["b"], limit=3)] == ["b"] * 3
    assert (await store.query_rollouts(run_id_in=["a"], limit=3)).total == 10


async def test_rollouts_of_no_run_are_anybodys(store: LightningStore) -> None:
    waiting = asyncio.create_task(store.dequeue_rollout("w", timeout=20.0, run_id="a"))
    await asyncio.sleep(0.1)
    await store.enqueue_rollout("other", run_id="b")
    await store.enqueue_rollout("free")
    claim = await waiting
    assert claim is not None
    assert (claim.input, claim.run_id) == ("free", None)
    everything = await store.dequeue_rollout("w")
    assert everything is not None
    assert everything.run_id == "b"


@pytest.mark.contract
async def test_all_that_an_algorithm_reads_comes_at_once(store: LightningStore) -> None:
    rollouts = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(3)])
    ids = [rollout.rollout_id for rollout in rollouts]
    for n in range(2):
        claim = await store.dequeue_rollout("w")
        assert claim is not None
        segments = make_segment("p", None, 0, [1, 2]), make_segment("r", "p", 2, [3 + n], version=1)
        await store.add_calls([make_call(claim, "call", "p", "r", *segments)])
        reward = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": float(n)}
        await store.add_many_spans([make_span(claim, "other"), make_span(claim, "reward", **reward)])
    found = await store.query_records([ids[1], "unknown", ids[0], ids[2]])
    assert [record.rollout.rollout_id for record in found] == [ids[1], ids[0], ids[2]]
    assert [[list(call.response_ids) for call in record.calls] for record in found] == [[[4]], [[3]], []]
    assert [[span.name for span in record.spans] for record in found] == [["reward"], ["reward"], []]
    assert [record.attempt is not None for record in found] == [True, True, False]
