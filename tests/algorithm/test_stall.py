"""A stalled step names the rollouts it waits for: where they are, since when, on which host; and goes on by rule."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import agentlightning as agl
from agentlightning.algorithm.base import TrainingContext, no_open_calls
from agentlightning.algorithm.sampling.rollouts import enqueue, finished_groups
from agentlightning.algorithm.stall import StallRule, phase_of
from agentlightning.errors import AgentError
from agentlightning.gateway import Gateway
from agentlightning.litagent import LitAgent
from agentlightning.metrics import Reporter, Sink
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.types import EnqueueRolloutRequest, Span
from agentlightning.types.names import CALL_ID, OPERATION, REWARD

SOON = 0.5
PATIENCE = 10.0
"""Seconds that a busy machine may take to notice."""


class Listener(Sink):
    """Keeps warnings, and tells who waits for one."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.first_at: float | None = None
        self._heard = asyncio.Event()

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        self.first_at = self.first_at or time.monotonic()
        self._heard.set()

    async def one_more(self) -> str:
        self._heard.clear()
        await self._heard.wait()
        return self.warnings[-1]


@asynccontextmanager
async def waiting_for(
    agent: LitAgent[Any] | None, tmp_path: Path, gateway: Gateway | None = None, store: Any = None
) -> AsyncIterator[tuple[TrainingContext, list[str], Listener]]:
    """Two rollouts of the agent under way; None: nobody claims them."""
    store, listener = store or InMemoryLightningStore(), Listener()
    resources = await store.add_resources({} if gateway is None else {"llm": gateway.as_resource("far")})
    open_calls = no_open_calls if gateway is None else gateway.open_calls
    context = TrainingContext(store, tmp_path, Reporter(listener), resources=resources, open_calls=open_calls)
    ids = await enqueue(context, [EnqueueRolloutRequest(input={"n": n}) for n in range(2)])
    running = None
    if agent is not None:
        runner = LitAgentRunner(OtelTracer(), gateway=gateway)
        runner.init(agent)
        runner.init_worker("host-7", store)
        running = asyncio.create_task(runner.iter())
    try:
        yield context, ids, listener
    finally:
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await store.close()


async def told(context: TrainingContext, ids: list[str], listener: Listener) -> str:
    """What is said of the stalled step, which goes on without its rollouts."""
    began = time.monotonic()
    await finished_groups(context, [ids], 1, "step 3: sampling", StallRule(seconds=SOON, action="cancel"))
    assert listener.first_at is not None
    assert SOON <= listener.first_at - began < SOON + PATIENCE, "at its deadline, and not before"
    return listener.warnings[0]


async def test_a_stuck_agent_is_named(tmp_path: Path) -> None:
    done = threading.Event()

    @agl.rollout
    def agent(task: Any) -> float:
        agl.emit_message("begins")
        done.wait(60)
        return 1.0

    async with waiting_for(agent, tmp_path) as (context, ids, listener):
        try:
            text = await told(context, ids, listener)
        finally:
            done.set()
        rollouts = await context.store.query_rollouts()
    assert "step 3: sampling: nothing has happened for 0.5 s. 2 rollouts are open" in text
    assert all(f"{i} on host-7: " in text for i in ids)
    assert 'task {"n": 1}' in text
    assert "give it a timeout" in text or "does not go on" in text
    assert "cancelled and left out of the update" in text
    assert [r.status for r in rollouts] == ["cancelled"] * 2


async def test_a_stuck_grader_is_named(tmp_path: Path) -> None:
    async def grader(run: Any) -> float:
        await asyncio.sleep(60)
        return 1.0

    agent = agl.Program([sys.executable, "-S", "-c", "print(1)"], grader=grader)
    async with waiting_for(agent, tmp_path) as (context, ids, listener):
        waiting = asyncio.create_task(finished_groups(context, [ids], 1, "step 3", StallRule(seconds=SOON)))
        text = await listener.one_more()
        while text.count(": grading for") != 2:  # starting programs takes a while
            text = await listener.one_more()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert "last heard: agentlightning.annotation" in text
    assert "The grader does not come back: give it a timeout." in text


async def test_a_stuck_engine_is_named(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    @agl.rollout
    async def agent(task: Any, llm: agl.LLM) -> float:
        async with httpx.AsyncClient(timeout=60, headers={"authorization": f"Bearer {llm.api_key}"}) as client:
            body = {"model": llm.model, "messages": [{"role": "user", "content": "hi"}]}
            await client.post(f"{llm.endpoint}/chat/completions", json=body)
        return 1.0

    store = InMemoryLightningStore()
    provider = agl.Provider(base_url=f"http://127.0.0.1:{port}/v1", timeout_seconds=60)
    async with (
        server,
        Gateway(store, None, None, models={"far": provider}) as gateway,
        waiting_for(agent, tmp_path, gateway, store) as (context, ids, listener),
    ):
        text = await told(context, ids, listener)
    assert text.count("waiting for the model for") == 2
    assert "The engine answers none of them" in text


async def test_rollouts_that_nobody_claims_are_named_again_and_again(tmp_path: Path) -> None:
    async with waiting_for(None, tmp_path) as (context, ids, listener):
        waiting = asyncio.create_task(finished_groups(context, [ids], 1, "step 3", StallRule(seconds=0.1)))
        await listener.one_more()
        await listener.one_more()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert "waiting for a runner" in listener.warnings[0]
    assert "agl runner" in listener.warnings[0]
    assert "It goes on waiting" in listener.warnings[0]


async def test_the_run_ends_where_that_is_the_rule(tmp_path: Path) -> None:
    async with waiting_for(None, tmp_path) as (context, ids, _):
        with pytest.raises(AgentError, match="on_stall='stop'"):
            await finished_groups(context, [ids], 1, "step 3", StallRule(seconds=0.1, action="stop"))
        assert [r.status for r in await context.store.query_rollouts()] == ["cancelled"] * 2


@pytest.mark.parametrize(
    ("name", "attributes", "waits", "phase"),
    [
        (None, {}, False, "claimed, nothing recorded yet"),
        (None, {}, True, "waiting for the model"),
        ("chat", {CALL_ID: "c", "gen_ai.response.finish_reasons": ["tool_calls"]}, False, "in a tool"),
        ("chat", {CALL_ID: "c", "gen_ai.response.finish_reasons": ["stop"]}, False, "in the agent's own code"),
        (OPERATION, {}, False, "in the agent's own code"),
        (REWARD, {}, False, "writing its end"),
    ],
)
def test_the_phase_is_told_by_what_was_heard_last(name: str | None, attributes: Any, waits: bool, phase: str) -> None:
    span = name and Span.from_attributes(name=name, attributes=attributes, rollout_id="r", attempt_id="a")
    assert phase_of(span or None, waits_for_model=waits) == phase
