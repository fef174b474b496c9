"""The gateway as a service: whose calls, failures, disconnects, closing, ports. Real HTTP, real store."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from agentlightning.errors import ConfigError, EngineError, GatewayError, StoreError, StoreUnavailableError
from agentlightning.gateway import Gateway
from agentlightning.keys import CALLS, SPANS, sign_attempt_key, verify_attempt_key
from agentlightning.rendering import RenderersRendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import LLM, AttemptStatus, CallRecord, RolloutMode
from tests.gateway.conftest import CALC, Site, calculator
from tests.gateway.scripted import ScriptedEngine

ASK: Any = [{"role": "user", "content": "What is 2 + 3?"}]


async def ask(site: Site, **fields: Any) -> Any:
    async with site.client() as client:
        return await client.chat.completions.create(model="policy", messages=ASK, **fields)


async def read(site: Site, stream: bool) -> list[Any]:
    """The parts of an answer."""
    async with site.client() as client:
        create: Any = client.chat.completions.create
        reply = await create(model="policy", messages=ASK, stream=stream)
        return [part async for part in reply] if stream else [reply]


async def leave(site: Site, stream: bool) -> None:
    """Ask, and go away while the answer is sampled; from a stream after its first words."""
    if not stream:
        asking = asyncio.create_task(read(site, stream))
        await _until(lambda: site.engine.running == 1)
        asking.cancel()
        await asyncio.wait([asking])
        return
    async with site.client() as client:
        create: Any = client.chat.completions.create
        reply = await create(model="policy", messages=ASK, stream=True)
        async for part in reply:
            if part.choices and part.choices[0].delta.content:
                break
        await reply.close()


async def raw(site: Site, head: str, body: bytes = b"") -> tuple[int, bytes]:
    """Send bytes as they are; the status and the body."""
    port = int(site.gateway.endpoint.split(":")[2].split("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"{head}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        + body
    )
    answer = await reader.read()
    writer.close()
    return int(answer[9:12]), answer.partition(b"\r\n\r\n")[2]


# ---- whose call ----------------------------------------------------------------------------------------------------


def test_keys_say_whose_they_are_and_cannot_be_made_up() -> None:
    key = sign_attempt_key(b"secret", "ro-1", "at-1", (CALLS,))
    found = verify_attempt_key(b"secret", key)
    assert found is not None
    assert (found.rollout_id, found.attempt_id, found.scopes) == ("ro-1", "at-1", (CALLS,))
    for forged in (key[:-2], key[:-2] + "xx", "agl-", "agl-%%%", "sk-123", "agl-ünï", ""):
        assert verify_attempt_key(b"secret", forged) is None
    assert verify_attempt_key(b"other", key) is None


async def test_the_key_alone_attributes_a_call(site: Site) -> None:
    async with AsyncOpenAI(base_url=site.gateway.endpoint, api_key=site.key, max_retries=0) as client:
        await client.chat.completions.create(model="policy", messages=ASK)
    assert len(await site.close()) == 1


async def test_the_agents_name_comes_by_header_url_or_baggage(site: Site) -> None:
    llm = LLM(endpoint=site.base_url, model="policy")
    ways: list[tuple[str, dict[str, str]]] = [
        (site.base_url, {"x-agl-agent": "by header"}),
        (llm.for_agent("by url").endpoint, {}),
        (site.base_url, {"baggage": "k=v, agentlightning.agent=by%20baggage;p=1"}),
        (llm.for_agent("by url").endpoint, {"x-agl-agent": "header wins"}),
        (site.base_url, {"baggage": "other.agentlightning.agent=x"}),
    ]
    for url, headers in ways:
        async with AsyncOpenAI(base_url=url, api_key=site.key, max_retries=0, default_headers=headers) as client:
            await client.chat.completions.create(model="policy", messages=ASK)
    assert [call.info.agent for call in await site.close()] == [
        "by header", "by url", "by baggage", "header wins", None
    ]  # fmt: skip


async def test_an_attempts_key_opens_no_other_attempt(site: Site) -> None:
    other = await site.another()
    async with AsyncOpenAI(base_url=other.base_url, api_key=site.key, max_retries=0) as client:
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await client.chat.completions.create(model="policy", messages=ASK)
    assert site.rollout_id in str(refused.value)
    reporter = sign_attempt_key(b"x" * 32, site.rollout_id, site.attempt_id, (SPANS,))
    async with AsyncOpenAI(base_url=site.base_url, api_key=reporter, max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="policy", messages=ASK)
    assert await other.close() == []


async def test_a_call_that_cannot_be_attributed_is_refused_with_the_fix(site: Site) -> None:
    async with AsyncOpenAI(base_url=site.gateway.endpoint, api_key="sk-none", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match=r"llm\.get_base_url"):
            await client.chat.completions.create(model="policy", messages=ASK)
    async with AsyncOpenAI(base_url=site.base_url, api_key="sk-none", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match=r"llm\.api_key"):
            await client.chat.completions.create(model="policy", messages=ASK)


async def test_unknown_finished_and_outdated_attempts_are_refused(site: Site) -> None:
    key = site.gateway.key_for("ro-none", "at-none")
    async with AsyncOpenAI(base_url=site.gateway.endpoint, api_key=key, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="no rollout"):
            await client.chat.completions.create(model="policy", messages=ASK)
    done = await site.another()
    await site.store.update_attempt(done.rollout_id, done.attempt_id, status=AttemptStatus.SUCCEEDED)
    with pytest.raises(openai.APIStatusError, match="succeeded"):
        await ask(done)
    await site.close()
    with pytest.raises(openai.APIStatusError, match="takes no more model calls") as refused:
        await ask(site)
    assert refused.value.status_code == 410, "a status that clients do not retry"


async def test_paths_with_and_without_v1(site: Site) -> None:
    body = json.dumps({"model": "policy", "messages": ASK}).encode()
    base = f"/rollout/{site.rollout_id}/attempt/{site.attempt_id}"
    for path in ("/chat/completions", "/v1/chat/completions", "/v1/v1/chat/completions"):
        status, answer = await raw(site, f"POST {base}{path} HTTP/1.1\r\nAuthorization: Bearer {site.key}", body)
        assert status == 200, answer
    status, answer = await raw(site, "GET /health HTTP/1.1")
    assert (status, json.loads(answer)) == (200, {"status": "ok", "instance": site.gateway.instance})
    status, answer = await raw(site, f"POST {base}/v1/embeddings HTTP/1.1\r\nAuthorization: Bearer {site.key}", body)
    assert (status, b"has no embeddings" in answer) == (400, True)
    body = json.dumps({"model": "text-embedding-3-small", "input": "a"}).encode()
    status, answer = await raw(site, f"POST {base}/v1/embeddings HTTP/1.1\r\nAuthorization: Bearer {site.key}", body)
    assert (status, b"models={'text-embedding-3-small': agl.Provider(" in answer) == (400, True)
    status, answer = await raw(site, f"POST {base}/v1/moderations HTTP/1.1", body)
    assert status == 404
    assert b"/v1/chat/completions" in answer
    assert (await raw(site, f"GET {base}/v1/chat/completions HTTP/1.1"))[0] == 405


# ---- failures ------------------------------------------------------------------------------------------------------


async def test_malformed_and_oversized_bodies(site: Site) -> None:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {site.key}"
    for body in (b"{", b"[]", b"\xff\xfe", b""):
        status, answer = await raw(site, head, body)
        assert status == 400, answer
        assert json.loads(answer)["error"]["code"] == "invalid_json"
    big = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "x" * 10_000_000}]}).encode()
    status, answer = await raw(site, head, big)
    assert json.loads(answer)["error"]["code"] == "context_length_exceeded"


async def test_an_engine_that_fails_is_a_server_error_and_recorded(site: Site) -> None:
    site.engine.fail = EngineError("out of memory")
    with pytest.raises(openai.InternalServerError, match="out of memory"):
        await ask(site)
    with pytest.raises(openai.InternalServerError):
        await ask(site, stream=True)
    summary = await site.gateway.close_attempt(site.rollout_id, site.attempt_id)
    assert (summary.calls, summary.failed, summary.infra_error) == (0, 2, "out of memory")
    assert {span.status.description for span in await site.spans()} == {"out of memory"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_its_sampling_and_is_recorded(site: Site, stream: bool) -> None:
    site.engine.delay = 0.2 if stream else 60.0
    await leave(site, stream)
    await _until(lambda: site.engine.running == 0)
    assert len(site.engine.aborted) == 1
    (call,) = await site.close()
    assert call.info.error == "the client disconnected"
    assert call.info.finish_reason == "abort"
    assert (len(call.response_ids) > 0) == stream


async def test_closing_an_attempt_ends_its_open_calls_and_stores_them(site: Site) -> None:
    site.engine.delay = 30.0
    open_calls = [asyncio.create_task(ask(site)) for _ in range(3)]
    await _until(lambda: site.engine.running == 3)
    async with asyncio.timeout(5):
        calls = await site.close()
    for ended in await asyncio.gather(*open_calls, return_exceptions=True):
        assert isinstance(ended, openai.APIStatusError)
    assert {call.info.error for call in calls} == {"the attempt was closed"}


async def test_a_call_is_recorded_though_nobody_reads_the_answer(site: Site) -> None:
    body = json.dumps({"model": "policy", "messages": ASK}).encode()
    port = int(site.gateway.endpoint.split(":")[2].split("/")[0])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\ncontent-type: application/json\r\nauthorization: Bearer {site.key}\r\n"
    )
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    await _until(lambda: len(site.engine.sampled) == 1)
    writer.close()
    assert len(await site.close()) == 1


class ShakyStore(InMemoryLightningStore):
    """A store that is away for its first writes of calls."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    async def add_calls(self, records: Sequence[CallRecord]) -> None:
        if self.failures > 0:
            self.failures -= 1
            raise StoreUnavailableError("the store is away")
        await super().add_calls(records)


@pytest.mark.parametrize("failures", [3, 10**6])
async def test_a_store_that_is_away(rendering: RenderersRendering, failures: int) -> None:
    store = ShakyStore(failures)
    engine = ScriptedEngine(rendering, calculator)
    gateway = Gateway(store, engine, rendering)
    await gateway.start()
    claimed = await store.start_rollout(input={}, mode=RolloutMode.VAL)
    site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
    await ask(site)
    if failures == 3:
        assert len(await site.close()) == 1
    else:
        with pytest.raises(StoreError, match="could not be stored within"):
            await gateway.close_attempt(site.rollout_id, site.attempt_id, timeout=0.2)
    await gateway.stop(timeout=0.2)
    await store.close()


async def test_many_calls_at_once_are_all_recorded_once(site: Site) -> None:
    places = [site] + [await site.another() for _ in range(9)]
    async with site.client() as client:
        create: list[Any] = [
            client.with_options(base_url=place.base_url, api_key=place.key).chat.completions.create for place in places
        ]
        await asyncio.gather(*[c(model="policy", messages=ASK, tools=[CALC], n=2) for c in create for _ in range(8)])
    for place in places:
        calls = await place.close()
        assert len({call.info.call_id for call in calls}) == 16
        site.check_exact(calls)


async def test_a_stream_says_when_it_breaks_off(site: Site) -> None:
    site.engine.delay = 0.02
    reading = asyncio.create_task(read(site, stream=True))
    await _until(lambda: site.engine.running == 1)
    await asyncio.sleep(0.1)
    await site.close()
    with pytest.raises(openai.APIError, match="ended before"):
        await reading


async def test_new_weights_in_the_middle_of_a_stream(site: Site) -> None:
    site.engine.delay = 0.01
    reading = asyncio.create_task(read(site, stream=True))
    await _until(lambda: site.engine.running == 1)
    await asyncio.sleep(0.05)
    site.engine.version = 1
    await reading
    (call,) = await site.close()
    first, second = call.versions
    assert (first.start, first.version, second.version) == (0, 0, 1)
    assert 0 < second.start < len(call.response_ids)
    site.check_exact([call])


async def test_a_silent_stream_is_kept_alive(store: InMemoryLightningStore, rendering: RenderersRendering) -> None:
    engine = ScriptedEngine(rendering, lambda prompt, params: "x")
    engine.delay = 0.2
    claimed = await store.start_rollout(input={}, mode=RolloutMode.VAL)
    async with Gateway(store, engine, rendering, keep_alive_seconds=0.05) as gateway:
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        body = json.dumps({"model": "policy", "messages": ASK, "stream": True}).encode()
        status, sent = await raw(site, f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {site.key}", body)
    assert status == 200
    assert sent.count(b": keep-alive") >= 2
    assert b"[DONE]" in sent


# ---- spans ---------------------------------------------------------------------------------------------------------


async def test_spans_follow_the_conventions_and_hold_only_new_messages(site: Site) -> None:
    async with site.client(default_headers={"x-agl-agent": "solver"}) as client:
        trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
        first = await client.chat.completions.create(model="policy", messages=ASK, tools=[CALC], extra_headers=trace)
        message: Any = first.choices[0].message
        assert message.tool_calls
        got: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}
        await client.chat.completions.create(model="policy", messages=[*ASK, message, got], tools=[CALC])
    await site.close()
    one, two = await site.spans()
    assert (one.name, one.trace_id, one.parent_id) == ("chat policy", "a" * 32, "b" * 16)
    assert one.attributes["gen_ai.response.id"] == first.id
    assert one.attributes["gen_ai.agent.name"] == "solver"
    assert json.loads(one.attributes["gen_ai.tool.definitions"]) == [CALC]
    assert json.loads(one.attributes["gen_ai.input.messages"])[0]["role"] == "user"
    (output,) = json.loads(one.attributes["gen_ai.output.messages"])
    assert output["finish_reason"] == "tool_calls"
    (new,) = json.loads(two.attributes["gen_ai.input.messages"])
    assert new["parts"] == [{"type": "tool_call_response", "id": message.tool_calls[0].id, "response": "5"}]
    assert two.attributes["agentlightning.parent_call_id"] == one.attributes["agentlightning.call_id"]
    assert "gen_ai.tool.definitions" not in two.attributes


# ---- life ----------------------------------------------------------------------------------------------------------


async def test_a_taken_port_is_a_clear_error(store: InMemoryLightningStore, rendering: RenderersRendering) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        gateway = Gateway(store, ScriptedEngine(rendering, calculator), rendering, port=port)
        with pytest.raises(GatewayError, match=f"127.0.0.1:{port}.*port 0"):
            await gateway.start()


async def test_settings_are_checked(store: InMemoryLightningStore, rendering: RenderersRendering) -> None:
    with pytest.raises(ConfigError, match="temprature"):
        Gateway(store, ScriptedEngine(rendering, calculator), rendering, train_sampling={"temprature": 1.0})


async def test_stopping_twice_and_closing_twice_is_harmless(site: Site) -> None:
    await ask(site)
    first = await site.gateway.close_attempt(site.rollout_id, site.attempt_id)
    assert await site.gateway.close_attempt(site.rollout_id, site.attempt_id) == first
    assert first.calls == 1
    await site.gateway.stop()
    await site.gateway.stop()


async def _until(condition: Any, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_an_attempt_that_ended_without_its_runner_is_forgotten(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = site.gateway._attempts  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(attempts, "_over_seconds", 0.0)
    await ask(site)
    live = attempts._live  # pyright: ignore[reportPrivateUsage]
    await attempts.forget_idle()
    assert list(live) == [(site.rollout_id, site.attempt_id)], "it goes on, however long it says nothing"
    await site.store.update_attempt(site.rollout_id, site.attempt_id, status=AttemptStatus.FAILED)
    await attempts.forget_idle()
    assert not live
    assert attempts.summary(site.rollout_id, site.attempt_id).calls == 1
    with pytest.raises(openai.APIStatusError, match="finished"):
        await ask(site)
