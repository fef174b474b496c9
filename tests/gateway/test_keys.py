"""An agent that is up to no good, with nothing but its own key: other attempts, the admin API and rewards are closed.

The store's own rules are swept too, over every route that the server documents.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from yarl import URL

from agentlightning.gateway import Gateway
from agentlightning.keys import CALLS, CLOSE, PREFIX, SPANS, TASK, sign_attempt_key
from agentlightning.rendering import RenderersRendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.http.server import LightningStoreServer
from agentlightning.types import RolloutMode
from agentlightning.types.reward import find_final_reward
from tests.gateway.conftest import Site, calculator
from tests.gateway.scripted import ScriptedEngine

SECRET = b"s" * 32
ASK: Any = {"model": "policy", "messages": [{"role": "user", "content": "What is 2 + 3?"}]}
ADMIN = "the admin's key"


@dataclass
class World:
    """A gateway and a store's server that know one secret, an attempt of the agent's own, and somebody else's."""

    gateway: Gateway
    server: LightningStoreServer
    mine: Site
    other: Site

    @property
    def key(self) -> str:
        """Of an agent whose rewards come from a grader."""
        return sign_attempt_key(SECRET, self.mine.rollout_id, self.mine.attempt_id, (CALLS, SPANS, TASK))

    async def send(
        self, url: str, body: Any = None, *, method: str = "POST", headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        given = {"authorization": f"Bearer {self.key}"} if headers is None else headers
        async with aiohttp.ClientSession() as session, session.request(method, url, json=body, headers=given) as answer:
            return answer.status, await answer.text()

    def at(self, site: Site, rest: str) -> str:
        """A URL at the gateway under an attempt."""
        root = self.gateway.endpoint.removesuffix("/v1")
        return f"{root}/rollout/{site.rollout_id}/attempt/{site.attempt_id}{rest}"

    async def untouched(self, site: Site) -> None:
        """Nothing is known of an attempt but that it runs."""
        rollout = await site.store.get_rollout_by_id(site.rollout_id)
        assert rollout is not None
        assert rollout.status == "preparing", "no span came, and nobody finished it"
        assert await site.spans() == []
        assert (await site.store.query_calls([site.rollout_id])).get(site.rollout_id, []) == []


@pytest.fixture
async def world(store: InMemoryLightningStore, rendering: RenderersRendering) -> AsyncIterator[World]:
    engine = ScriptedEngine(rendering, calculator)
    sites: list[Site] = []
    async with Gateway(store, engine, rendering, secret=SECRET) as gateway:
        for _ in range(2):
            claimed = await store.start_rollout(input={"secret": "task"}, mode=RolloutMode.TRAIN)
            sites.append(Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id))
        server = LightningStoreServer(store, port=0, admin_key=ADMIN, secret=SECRET)
        await server.start()
        yield World(gateway, server, *sites)
        await server.stop()


# ---- the gateway ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages", "/completions", "/reward", "/close"])
async def test_another_attempts_paths_are_closed(world: World, path: str) -> None:
    body = {**ASK, "input": "x", "prompt": "x", "max_tokens": 5, "reward": 1.0}
    for rest in (path, f"/v1{path}", f"/agent/x/v1{path}"):
        status, text = await world.send(world.at(world.other, rest), body)
        assert status in (403, 404), text
    await world.untouched(world.other)


async def test_no_spelling_of_a_path_leads_elsewhere(world: World) -> None:
    mine, other = (f"rollout/{s.rollout_id}/attempt/{s.attempt_id}" for s in (world.mine, world.other))
    root = world.gateway.endpoint.removesuffix("/v1")
    for path in (
        f"{mine}/../../../../{other}/v1/chat/completions",
        f"{mine}/%2e%2e/%2e%2e/%2e%2e/%2e%2e/{other}/v1/chat/completions",
        f"{mine}/{other}/v1/chat/completions",
        f"{other}/{mine}/v1/chat/completions",
        f"{other}%2f..%2f{world.mine.attempt_id}/v1/chat/completions",
        f"v1/{other}/v1/chat/completions",
        f"rollout/{world.mine.rollout_id}/attempt/{world.other.attempt_id}/v1/chat/completions",
        f"rollout/{world.other.rollout_id}/attempt/{world.mine.attempt_id}/v1/chat/completions",
    ):
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                URL(f"{root}/{path}", encoded=True), json=ASK, headers={"authorization": f"Bearer {world.key}"}
            ) as answer,
        ):
            assert answer.status in (403, 404), (path, await answer.text())
    await world.untouched(world.other)


async def test_a_key_that_was_tampered_with_is_none(world: World) -> None:
    raw = world.key.removeprefix(PREFIX)
    bytes_ = base64.urlsafe_b64decode(raw + "=" * (-len(raw) % 4))
    signature, payload = bytes_[:24], bytes_[24:]
    theirs = payload.replace(world.mine.rollout_id.encode(), world.other.rollout_id.encode())
    theirs = theirs.replace(world.mine.attempt_id.encode(), world.other.attempt_id.encode())
    rich = json.dumps([world.mine.rollout_id, world.mine.attempt_id, [CALLS, SPANS, TASK, CLOSE, "rewards"]]).encode()
    for forged in (signature + theirs, signature + rich, b"\0" * 24 + payload, payload, signature):
        key = PREFIX + base64.urlsafe_b64encode(forged).rstrip(b"=").decode()
        for site, path in (
            (world.other, "/v1/chat/completions"),
            (world.mine, "/v1/reward"),
            (world.mine, "/v1/close"),
        ):
            headers = {"authorization": f"Bearer {key}"}
            status, text = await world.send(world.at(site, path), {**ASK, "reward": 1.0}, headers=headers)
            assert status == 401, text
    await world.untouched(world.other)


async def test_headers_do_not_speak_for_others(world: World) -> None:
    """Baggage, our own headers and a second key name another attempt; the key that counts is the first one's."""
    own, theirs = f"Bearer {world.key}", world.other.key
    url = f"{world.gateway.endpoint}/chat/completions"
    named = f"{world.other.rollout_id}/{world.other.attempt_id}"
    status, text = await world.send(url, ASK, headers={"authorization": own, "x-agl-attempt": named})
    assert status == 403, text
    baggage = f"agentlightning.rollout_id={world.other.rollout_id},agentlightning.attempt_id={world.other.attempt_id}"
    for headers in ({"authorization": own, "baggage": baggage}, {"authorization": own, "x-api-key": theirs}):
        status, text = await world.send(url, ASK, headers=headers)
        assert status == 200, text
    await world.untouched(world.other)
    assert len(await world.mine.close()) == 2


async def test_what_another_attempt_said_cannot_be_read(world: World) -> None:
    """Stateful responses are looked up in the attempt's own history only."""
    body = {"model": "policy", "input": "My secret is swordfish."}
    status, text = await world.send(
        world.at(world.other, "/v1/responses"), body, headers={"authorization": f"Bearer {world.other.key}"}
    )
    assert status == 200
    said = json.loads(text)["id"]
    more = {"model": "policy", "input": "Again?", "previous_response_id": said}
    status, text = await world.send(world.at(world.mine, "/v1/responses"), more)
    assert status in (400, 404), text
    assert "swordfish" not in text


async def test_a_reward_cannot_be_forged(world: World) -> None:
    """Not where a grader gives them: neither by HTTP, nor as a span, nor as an OTLP span, nor by closing early."""
    assert (await world.send(world.at(world.mine, "/v1/reward"), {"reward": 1.0}))[0] == 403
    assert (await world.send(world.at(world.mine, "/v1/close")))[0] == 403
    owner = {"rollout_id": world.mine.rollout_id, "attempt_id": world.mine.attempt_id}
    span = {
        **owner,
        "sequence_id": 1,
        "trace_id": "a" * 32,
        "span_id": "b" * 16,
        "name": "x",
        "attributes": {"agentlightning.reward.0.value": 1.0},
    }
    spans = f"{world.server.endpoint}/v1/agl/spans"
    status, text = await world.send(spans, [{**span, "attributes": {}}, span])
    assert status == 403, text
    key = "agentlightning.reward.0.value"
    otlp: dict[str, Any] = {
        "traceId": "a" * 32,
        "spanId": "b" * 16,
        "name": "x",
        "kind": 1,
        "startTimeUnixNano": "1",
        "endTimeUnixNano": "2",
        "attributes": [{"key": key, "value": {"doubleValue": 1.0}}],
    }
    theirs = {"rollout_id": world.other.rollout_id, "attempt_id": world.other.attempt_id}
    for whose, attributes in ((owner, otlp["attributes"]), (theirs, [])):
        resource = [{"key": f"agentlightning.{k}", "value": {"stringValue": v}} for k, v in whose.items()]
        sent = [{"spans": [{**otlp, "attributes": attributes}]}]
        body = {"resourceSpans": [{"resource": {"attributes": resource}, "scopeSpans": sent}]}
        status, text = await world.send(f"{world.server.endpoint}/v1/traces", body)
        assert status == 403, text
    await world.untouched(world.other)
    assert find_final_reward(await world.mine.spans()) is None


async def test_a_span_of_ones_own_does_not_replace_the_gateways(world: World) -> None:
    assert (await world.send(world.at(world.mine, "/v1/chat/completions"), ASK))[0] == 200
    (call,) = await world.mine.close()
    (span,) = await world.mine.spans()
    forged = span.model_copy(update={"name": "forged", "attributes": {"gen_ai.usage.output_tokens": 0}})
    await world.send(f"{world.server.endpoint}/v1/agl/spans", [forged.model_dump(mode="json")])
    (after,) = await world.mine.spans()
    assert (after.name, after.attributes) == (span.name, span.attributes)
    (again,) = (await world.mine.store.query_calls([world.mine.rollout_id]))[world.mine.rollout_id]
    assert again.response_ids.tolist() == call.response_ids.tolist()


# ---- the store's server --------------------------------------------------------------------------------------------


async def test_every_route_of_the_store_is_closed_to_an_agent(world: World) -> None:
    """All that the server documents, with the other attempt's ids, and with its own where those would do harm."""
    status, text = await world.send(
        f"{world.server.endpoint}/openapi.json", method="GET", headers={"authorization": f"Bearer {ADMIN}"}
    )
    assert status == 200
    routes = [(m.upper(), path) for path, methods in json.loads(text)["paths"].items() for m in methods]
    assert len(routes) > 20
    elsewhere = {"/v1/agl/health", "/v1/traces"}  # open to all; tried by the test of rewards
    own_only = {("GET", "/v1/agl/rollouts/{rollout_id}"), ("POST", "/v1/agl/spans")}
    for method, path in routes:
        if path in elsewhere:
            continue
        for site in (world.other, world.mine):
            if site is world.mine and (method, path) in own_only:
                continue
            url = path.replace("{rollout_id}", site.rollout_id).replace("{attempt_id}", site.attempt_id)
            url = url.replace("{", "").replace("}", "")
            ids = {"rollout_id": site.rollout_id, "attempt_id": site.attempt_id}
            span = {**ids, "trace_id": "1" * 32, "span_id": "2" * 16, "name": "forged"}
            body = [span] if path.endswith("/spans") else {}
            status, text = await world.send(world.server.endpoint + url, body, method=method)
            assert status == 403, (method, url, status, text)
    await world.untouched(world.other)
