"""A gateway before the real engine with the shipped model, and a witness of what the engine sampled."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest_asyncio
from transformers import AutoTokenizer

import agentlightning as agl
from agentlightning.backend.embedded.client import ModelProcess
from agentlightning.backend.embedded.protocol import ProcessSettings
from agentlightning.engine.base import Chunk, Engine, EngineInfo, SamplingParams, concat
from agentlightning.gateway import Gateway
from agentlightning.models import resolve_model
from agentlightning.rendering import load_rendering
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import OtelTracer, Tracer
from agentlightning.types import (
    AttemptedRollout,
    Call,
    EnqueueRolloutRequest,
    RecordedAttempt,
    RolloutMode,
    Span,
    recording_of,
)
from agentlightning.types.call import Int32Array
from agentlightning.types.recording import tool_call_ids_of
from tests.clients.script import ScriptedEngine
from tests.clients.tool import agent_name

TRAINED, OTHER = "solver", "helper"
MAX_CONTEXT = 1024


class WitnessedEngine:
    """Passes everything on to the engine and writes down what it sampled."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.sampled: list[tuple[Int32Array, Chunk]] = []

    async def info(self) -> EngineInfo:
        return await self._engine.info()

    async def generate(
        self, prompt_ids: Int32Array, params: SamplingParams, *, stream: bool = False, request_id: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        chunks: list[Chunk] = []
        async for chunk in self._engine.generate(prompt_ids, params, stream=stream, request_id=request_id):
            chunks.append(chunk)
            yield chunk
        self.sampled.append((prompt_ids.copy(), concat(chunks)))


class SayingEngine:
    """Says what `say` says to the text of a prompt. Log-probs are made up, each time others."""

    def __init__(self, engine: Engine, say: Callable[[str], str], max_context: int = 4096) -> None:
        self._engine, self._say, self._max_context = engine, say, max_context
        self._tokenizer: Any = AutoTokenizer.from_pretrained(resolve_model("calc"))
        self._random = np.random.default_rng(0)

    async def info(self) -> EngineInfo:
        return msgspec.structs.replace(await self._engine.info(), max_context=self._max_context)

    async def generate(
        self, prompt_ids: Int32Array, params: SamplingParams, *, stream: bool = False, request_id: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        said = self._say(self._tokenizer.decode(prompt_ids.tolist(), skip_special_tokens=False))
        ids = [*self._tokenizer.encode(said, add_special_tokens=False), self._tokenizer.eos_token_id]
        logprobs = -self._random.random(len(ids), dtype=np.float32)
        yield Chunk(
            ids=np.array(ids, dtype=np.int32),
            logprobs=logprobs,
            plain_logprobs=logprobs,
            version=0,
            finish_reason="stop",
        )


@dataclass
class Run:
    """What became of the rollouts of one agent."""

    rollouts: list[AttemptedRollout]
    calls: dict[str, list[Call]]
    spans: dict[str, list[Span]]
    sampled: list[tuple[Int32Array, Chunk]] = field(default_factory=list)

    def all_calls(self) -> list[Call]:
        return [call for calls in self.calls.values() for call in calls]

    def recordings(self) -> list[RecordedAttempt]:
        """The record of each rollout, which refuses whatever is not in it."""
        return [
            recording_of(i, self.calls[i], tool_call_ids_of(self.spans[i]), diverged="refuse")
            for i in (r.rollout_id for r in self.rollouts)
        ]

    def exact(self) -> int:
        """How many calls are, token by token and bit by bit, ones that the engine sampled."""
        left: dict[tuple[bytes, bytes], list[Chunk]] = {}
        for prompt, chunk in self.sampled:
            left.setdefault((prompt.tobytes(), chunk.ids.tobytes()), []).append(chunk)
        found = 0
        for call in self.all_calls():
            twins = left.get((call.prompt_ids.tobytes(), call.response_ids.tobytes()), [])
            twin = next((t for t in twins if np.array_equal(t.logprobs, call.logprobs)), None)
            if twin is not None:
                twins[:] = [t for t in twins if t is not twin]
                found += 1
        return found

    def continued(self) -> int:
        """How many calls after the first of their rollout go on from the tokens of an earlier one."""
        count = 0
        for calls in self.calls.values():
            wholes = [call.prompt_ids.tobytes() + call.response_ids.tobytes() for call in calls]
            for n, call in enumerate(calls[1:], start=1):
                count += any(call.prompt_ids.tobytes().startswith(whole) for whole in wholes[:n])
        return count


Solve = Callable[[str, agl.LLM, bool], Awaitable[str]]


class World:
    """Runs an agent on tasks through store, runner, gateway and engine."""

    def __init__(self, process: ModelProcess) -> None:
        tokenizer = AutoTokenizer.from_pretrained(resolve_model("calc"))
        self.process = process
        self.rendering = load_rendering(resolve_model("calc"))
        self.real = WitnessedEngine(process)
        self._scripted = WitnessedEngine(ScriptedEngine(process, tokenizer, tokenizer.eos_token_id))

    async def run(
        self,
        solve: Solve,
        stream: bool,
        tasks: list[dict[str, Any]],
        *,
        scripted: bool,
        tracer: Tracer | None = None,
        named: bool = True,
        name: str = "{}",
        forks_of: Run | None = None,
    ) -> Run:
        """All at once, every second one under another agent's name, which is not trained: the endpoint says the name if
        it is `named`, else the agent itself may, in the form that `name` has.

        `forks_of`: an earlier run of these tasks, from whose record alone all calls are answered.
        """
        engine = self._scripted if scripted else self.real

        @agl.rollout
        async def agent(task: dict[str, Any], llm: agl.LLM) -> float:
            agent_name.set(task["agent"])
            text = await solve(task["question"], llm.for_agent(task["agent"]) if named else llm, stream)
            agl.emit_message(f"{task['question']} {text}")
            return float(task["answer"] in text)

        store = InMemoryLightningStore()
        trained = f"^{re.escape(name.format(TRAINED))}$"
        gateway = Gateway(store, engine, self.rendering, train_sampling={"temperature": 0.0}, train_agents=trained)
        recordings = None if forks_of is None else forks_of.recordings()
        return await carried_out(agent, tasks, engine, store, gateway, tracer, recordings)


async def carried_out(
    agent: Any,
    tasks: list[dict[str, Any]],
    engine: WitnessedEngine,
    store: InMemoryLightningStore,
    gateway: Gateway,
    tracer: Tracer | None = None,
    recordings: Sequence[RecordedAttempt] | None = None,
) -> Run:
    """All tasks at once, through a runner of their own; the gateway and the store end with them."""
    await gateway.start()
    runner = LitAgentRunner(tracer or OtelTracer(), concurrency=len(tasks), gateway=gateway)
    runner.init(agent)
    runner.init_worker(0, store)
    given: dict[str, Any] = {"llm": gateway.as_resource()}
    of_each = [await store.add_resources({**given, "recording": one}) for one in recordings or ()]
    of_each = of_each or [await store.add_resources(given)] * len(tasks)
    engine.sampled.clear()
    requests = [
        EnqueueRolloutRequest(input=task, mode=RolloutMode.TRAIN, resources_id=resources.resources_id)
        for task, resources in zip(tasks, of_each, strict=True)
    ]
    ids = [r.rollout_id for r in await store.enqueue_many_rollouts(requests)]
    stop = asyncio.Event()
    running = asyncio.create_task(runner.iter(stop))
    try:
        async with asyncio.timeout(150):
            await store.wait_for_rollouts(rollout_ids=ids)
    finally:
        stop.set()
        await running
        runner.teardown()
        await gateway.stop()
    calls = await store.query_calls(ids)
    found = [await store.get_rollout_by_id(i) for i in ids]
    result = Run(
        rollouts=[r for r in found if isinstance(r, AttemptedRollout)],
        calls={i: list(calls[i]) for i in ids},
        spans={i: list(await store.query_spans(i)) for i in ids},
        sampled=list(engine.sampled),
    )
    await store.close()
    return result


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def world() -> AsyncIterator[World]:
    process = ModelProcess(ProcessSettings(model=resolve_model("calc"), max_context=MAX_CONTEXT))
    await process.start()
    yield World(process)
    await process.close()
