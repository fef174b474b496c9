"""Resources and workers."""

from __future__ import annotations

import pytest

from agentlightning.errors import ConfigError, ConflictError
from agentlightning.store import LightningStore
from agentlightning.types import LLM, NamedResources, PromptTemplate, ProxyLLM, Resource, WorkerStatus


class Rubric(Resource):
    """A user's own type of resource."""

    resource_type: str = "rubric"
    points: list[int]


class Nameless(LLM):
    """One that forgot to give itself a resource_type."""


RESOURCES: NamedResources = {
    "llm": ProxyLLM(endpoint="http://x/v1", model="m", sampling_parameters={"temperature": 1.0}),
    "prompt": PromptTemplate(template="{x}", engine="jinja"),
    "rubric": Rubric(points=[1, 2]),
}


@pytest.mark.contract
async def test_resources_come_back_with_their_types(store: LightningStore) -> None:
    assert await store.get_latest_resources() is None
    added = await store.add_resources(RESOURCES, resources_id="rs1")
    assert added.version == 1
    assert added.resources == RESOURCES
    assert await store.get_resources_by_id("rs1") == added
    assert await store.get_resources_by_id("no") is None
    with pytest.raises(ConfigError, match="resource_type of its own"):
        await store.add_resources({"x": Nameless(endpoint="", model="")})


@pytest.mark.contract
async def test_adding_is_idempotent_and_updating_counts_up(store: LightningStore) -> None:
    first = await store.add_resources(RESOURCES, resources_id="rs1")
    assert await store.add_resources(RESOURCES, resources_id="rs1") == first
    with pytest.raises(ConflictError, match="another content"):
        await store.add_resources({}, resources_id="rs1")
    other = await store.add_resources({})
    assert await store.get_latest_resources() == other
    updated = await store.update_resources("rs1", {"rubric": Rubric(points=[])})
    assert (updated.version, updated.create_time) == (2, first.create_time)
    assert await store.get_latest_resources() == updated
    page = await store.query_resources(resources_id_contains="s1")
    assert (list(page), page.total) == ([updated], 1)
    assert (await store.query_resources(sort_by="update_time", sort_order="desc"))[0] == updated


async def test_rollouts_are_pinned_to_the_latest_resources(store: LightningStore) -> None:
    first = await store.add_resources(RESOURCES)
    rollout = await store.enqueue_rollout(1)
    await store.add_resources({})
    claim = await store.dequeue_rollout()
    assert claim is not None
    assert rollout.resources_id == claim.resources_id == first.resources_id


async def test_workers(store: LightningStore) -> None:
    worker = await store.update_worker("w1", {"cpu": 1})
    assert (worker.status, worker.heartbeat_stats) == (WorkerStatus.IDLE, {"cpu": 1})
    await store.enqueue_rollout(1)
    assert await store.dequeue_rollout("w2") is not None
    assert await store.dequeue_rollout("w3") is None
    found = {w.worker_id: w for w in await store.query_workers()}
    assert {name: w.status for name, w in found.items()} == {
        "w1": WorkerStatus.IDLE,
        "w2": WorkerStatus.BUSY,
        "w3": WorkerStatus.UNKNOWN,
    }
    assert found["w2"].current_rollout_id is not None
    assert found["w3"].last_dequeue_time is not None
    busy = await store.query_workers(status_in=[WorkerStatus.BUSY])
    assert [w.worker_id for w in busy] == ["w2"]
    beat = await store.update_worker("w1")
    assert beat.heartbeat_stats == {"cpu": 1}


async def test_what_a_worker_holds_that_is_gone_is_given_back(store: LightningStore) -> None:
    claims = [await store.start_rollout(n, worker_id="w") for n in range(3)]
    other = await store.start_rollout(3, worker_id="v")
    await store.update_worker("w")
    assert await store.release_worker("w", "It is gone.", quiet_seconds=60.0) == 0, "it was heard of just now"
    assert await store.release_worker("w", "It is gone.") == 3
    assert await store.release_worker("w", "It is gone.") == 0
    for claim in claims:
        attempt = await store.get_latest_attempt(claim.rollout_id)
        assert attempt is not None
        assert (attempt.status, attempt.outcome, attempt.error) == ("unresponsive", "infra_error", "It is gone.")
        found = await store.get_rollout_by_id(claim.rollout_id)
        assert found is not None
        assert found.status == "requeuing"
    kept = await store.get_latest_attempt(other.rollout_id)
    assert kept is not None
    assert kept.status == "preparing"


async def test_a_worker_is_busy_until_its_last_attempt_ends(store: LightningStore) -> None:
    claims = [await store.start_rollout(n, worker_id="w") for n in range(2)]
    for claim, status in zip(claims, (WorkerStatus.BUSY, WorkerStatus.IDLE), strict=True):
        await store.update_rollout(claim.rollout_id, status="cancelled")  # pyright: ignore[reportArgumentType]
        worker = await store.get_worker_by_id("w")
        assert worker is not None
        assert worker.status is status
