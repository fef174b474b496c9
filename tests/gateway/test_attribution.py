"""Clients made once for all rollouts: the real ones, fifty rollouts at a time, each call with its own attempt."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import anthropic
import httpx
import openai
import pytest
from opentelemetry import trace as otel_trace

import agentlightning as agl
from agentlightning.errors import GatewayError
from agentlightning.gateway import Gateway
from agentlightning.rendering import RenderersRendering
from agentlightning.runner import LitAgentRunner
from agentlightning.runner.executor import agent_loop
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import OtelTracer, uninstrument
from agentlightning.types import AttemptedRollout, Call, EnqueueRolloutRequest, RolloutMode, Span
from tests.gateway.scripted import ScriptedEngine

ROLLOUTS = 50
BODY: Any = {"model": "policy"}


def ask(task: str) -> Any:
    return [{"role": "user", "content": f"My task is {task}"}]


def echo(prompt: str, _params: object) -> str:
    """Says which task it was asked about."""
    return "You said " + prompt.rpartition("My task is ")[2].partition("<|im_end|>")[0]


class Clients:
    """Everything an agent may have made at module level, on the gateway's general base URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        root = url.removesuffix("/v1")
        self.openai = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        self.sync = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=root, api_key="none", max_retries=0)
        self.httpx = httpx.AsyncClient(base_url=url)
        self._aiohttp: aiohttp.ClientSession | None = None

    @property
    def aiohttp(self) -> aiohttp.ClientSession:
        if self._aiohttp is None:
            self._aiohttp = aiohttp.ClientSession(headers={"Authorization": "Bearer none"})
        return self._aiohttp

    async def by_openai(self, task: str) -> str:
        reply = await self.openai.chat.completions.create(**BODY, messages=ask(task))
        return reply.choices[0].message.content or ""

    async def by_openai_stream(self, task: str) -> str:
        parts = await self.openai.chat.completions.create(**BODY, messages=ask(task), stream=True)
        return "".join([p.choices[0].delta.content or "" async for p in parts if p.choices])

    async def by_anthropic(self, task: str) -> str:
        reply: Any = await self.anthropic.messages.create(**BODY, messages=ask(task), max_tokens=99)
        return reply.content[0].text

    async def by_httpx(self, task: str) -> str:
        reply = await self.httpx.post("/chat/completions", json={**BODY, "messages": ask(task)})
        return reply.json()["choices"][0]["message"]["content"]

    async def by_aiohttp(self, task: str) -> str:
        body = {**BODY, "messages": ask(task)}
        async with self.aiohttp.post(f"{self.url}/chat/completions", json=body) as reply:
            return (await reply.json())["choices"][0]["message"]["content"]

    async def close(self) -> None:
        """In the agents' loop, where their connections are."""
        self.sync.close()
        await asyncio.gather(self.openai.close(), self.anthropic.close(), self.httpx.aclose())
        if self._aiohttp is not None:
            await self._aiohttp.close()

    def in_a_thread(self, task: str) -> str:
        reply = self.sync.chat.completions.create(**BODY, messages=ask(task))
        return reply.choices[0].message.content or ""


@pytest.fixture
async def gateway(store: InMemoryLightningStore, rendering: RenderersRendering) -> AsyncIterator[Gateway]:
    engine = ScriptedEngine(rendering, echo)
    engine.delay = 0.01
    async with Gateway(store, engine, rendering) as found:
        yield found
    uninstrument()


@pytest.fixture(params=["address", "placeholder"])
async def clients(request: pytest.FixtureRequest, gateway: Gateway) -> AsyncIterator[Clients]:
    found = Clients(gateway.endpoint if request.param == "address" else agl.GATEWAY_URL)
    yield found
    await agent_loop().run(found.close())


@pytest.fixture
async def by_address(gateway: Gateway) -> AsyncIterator[Clients]:
    found = Clients(gateway.endpoint)
    yield found
    await agent_loop().run(found.close())


async def run(store: InMemoryLightningStore, gateway: Gateway, agent: Any, tasks: list[str]) -> list[AttemptedRollout]:
    """Run the agent on all tasks at once."""
    await store.add_resources({"llm": gateway.as_resource()})
    runner = LitAgentRunner(OtelTracer(), concurrency=len(tasks), gateway=gateway)
    runner.init(agent)
    runner.init_worker(0, store)
    requests = [EnqueueRolloutRequest(input=task, mode=RolloutMode.TRAIN) for task in tasks]
    ids = [r.rollout_id for r in await store.enqueue_many_rollouts(requests)]
    stop = asyncio.Event()
    running = asyncio.create_task(runner.iter(stop))
    try:
        async with asyncio.timeout(60):
            await store.wait_for_rollouts(rollout_ids=ids)
    finally:
        stop.set()
        await running
        runner.teardown()
    found = [await store.get_rollout_by_id(i) for i in ids]
    return [r for r in found if isinstance(r, AttemptedRollout)]


async def calls_of(store: InMemoryLightningStore, rollout: AttemptedRollout) -> list[tuple[Call, Span]]:
    """The calls that were attributed to a rollout, each with its span."""
    calls = (await store.query_calls([rollout.rollout_id]))[rollout.rollout_id]
    spans = (await store.query_spans(rollout.rollout_id)).items
    by_id = {
        span.attributes["agentlightning.call_id"]: span for span in spans if "agentlightning.call_id" in span.attributes
    }
    return [(call, by_id[call.info.call_id]) for call in calls]


def asked(span: Span) -> str:
    (message,) = json.loads(span.attributes["gen_ai.input.messages"])
    return message["parts"][0]["content"]


async def check(store: InMemoryLightningStore, rollouts: list[AttemptedRollout], count: int) -> None:
    assert len(rollouts) == ROLLOUTS
    for rollout in rollouts:
        assert rollout.attempt.outcome == "ok", rollout.attempt.error
        found = await calls_of(store, rollout)
        assert len(found) == count
        assert {asked(span) for _, span in found} == {f"My task is {rollout.input}"}


@pytest.mark.slow
@pytest.mark.quick_with("placeholder")
async def test_fifty_rollouts_share_their_clients_without_cross_talk(
    store: InMemoryLightningStore, gateway: Gateway, clients: Clients
) -> None:
    @agl.rollout
    async def agent(task: str) -> float:
        ways = (clients.by_openai, clients.by_openai_stream, clients.by_anthropic, clients.by_httpx, clients.by_aiohttp)
        said = await asyncio.gather(*[way(task) for way in ways])
        assert said == [f"You said {task}"] * len(ways)
        return 1.0

    await check(store, await run(store, gateway, agent, [f"number {n}" for n in range(ROLLOUTS)]), 5)


@pytest.mark.quick_with("address")
async def test_sync_agents_and_their_thread_pools(
    store: InMemoryLightningStore, gateway: Gateway, clients: Clients
) -> None:
    shared = ThreadPoolExecutor(4)

    @agl.rollout
    def agent(task: str) -> float:
        said = [clients.in_a_thread(task), *shared.map(clients.in_a_thread, [task] * 2)]
        with ThreadPoolExecutor(2) as own:
            said += own.map(clients.in_a_thread, [task] * 2)
        assert said == [f"You said {task}"] * 5
        return 1.0

    await check(store, await run(store, gateway, agent, [f"number {n}" for n in range(ROLLOUTS)]), 5)
    shared.shutdown()


async def test_a_thread_without_the_context_is_refused_with_the_fix(
    store: InMemoryLightningStore, gateway: Gateway, by_address: Clients
) -> None:
    clients = by_address
    told: list[str] = []

    def alone(task: str) -> None:
        try:
            clients.in_a_thread(task)
        except openai.AuthenticationError as error:
            told.append(str(error))

    @agl.rollout
    def agent(task: str) -> float:
        thread = threading.Thread(target=alone, args=(task,))
        thread.start()
        thread.join()
        return 0.0

    (rollout,) = await run(store, gateway, agent, ["x"])
    assert await calls_of(store, rollout) == []
    assert "copy_context().run" in told[0]
    outside = pytest.raises(GatewayError, match="outside of a rollout")
    with openai.OpenAI(base_url=agl.GATEWAY_URL, api_key="none", max_retries=0) as client, outside:
        client.chat.completions.create(**BODY, messages=ask("x"))


async def test_another_rollouts_client_is_refused(store: InMemoryLightningStore, gateway: Gateway) -> None:
    """A client that was made in the first rollout and kept."""
    kept: list[openai.AsyncOpenAI] = []
    told: list[str] = []

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> float:
        first = not kept
        if first:
            kept.append(openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0))
        try:
            await kept[0].chat.completions.create(**BODY, messages=ask(task))
        except openai.PermissionDeniedError as error:
            told.append(str(error))
        if first:
            await asyncio.sleep(0.2)  # it is still running when the others call
            await kept[0].close()
        return 0.0

    rollouts = await run(store, gateway, agent, ["a", "b", "c"])
    assert sorted([len(await calls_of(store, r)) for r in rollouts]) == [0, 0, 1]
    assert len(told) == 2
    assert all("GATEWAY_URL" in text for text in told)


async def test_calls_lie_under_the_agents_spans_and_carry_the_agents_name(
    store: InMemoryLightningStore, gateway: Gateway, by_address: Clients
) -> None:
    """The framework's span of a call and ours are joined by the response's id, and by being its child."""
    clients = by_address
    tracer = otel_trace.get_tracer("framework")

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> float:
        with tracer.start_as_current_span("invoke_agent", attributes={"gen_ai.agent.name": "the planner"}):
            with tracer.start_as_current_span("chat") as span:
                reply = await clients.openai.chat.completions.create(**BODY, messages=ask(task))
                span.set_attribute("gen_ai.response.id", reply.id)
            writer = llm.for_agent("writer")
            async with openai.AsyncOpenAI(base_url=writer.endpoint, api_key=writer.api_key) as own:
                await own.chat.completions.create(**BODY, messages=ask(task))
        await clients.by_openai(task)
        return 0.0

    (rollout,) = await run(store, gateway, agent, ["x"])
    assert rollout.attempt.outcome == "ok", rollout.attempt.error
    found = await calls_of(store, rollout)
    assert [call.info.agent for call, _ in found] == ["the planner", "writer", None]
    spans = (await store.query_spans(rollout.rollout_id)).items
    (frameworks,) = [span for span in spans if span.name == "chat"]
    (call, ours), *_ = found
    assert frameworks.attributes["gen_ai.response.id"] == call.info.response_id
    assert (ours.trace_id, ours.parent_id) == (frameworks.trace_id, frameworks.span_id)
    assert found[-1][1].parent_id is None
