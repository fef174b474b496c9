"""A gateway on a real port, a real store, the shipped model's tokenizer, and an engine that follows a script."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from openai import AsyncOpenAI

from agentlightning.gateway import Gateway, load_rendering
from agentlightning.models import resolve_model
from agentlightning.rendering import RenderersRendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Call, RolloutMode, Span
from tests.gateway.scripted import Script, ScriptedEngine

CALC: Any = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "One binary operation.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


def call_text(a: int, b: int) -> str:
    """A tool call as the model writes it; not as `json.dumps` would."""
    return f'<tool_call>\n{{"name": "calc", "arguments": {{"a":{a},  "b":{b}}}}}\n</tool_call>'


def calculator(prompt: str, _params: object) -> str:
    """Calls the tool once, then answers with its result."""
    last = prompt.rpartition("<|im_start|>user")[2]
    if "<tool_response>" not in last:
        return call_text(2, 3)
    return "The answer is " + last.partition("<tool_response>\n")[2].partition("\n</tool_response>")[0] + "."


@pytest.fixture(scope="session")
def rendering() -> RenderersRendering:
    return load_rendering(resolve_model("calc"))


@dataclass
class Site:
    """A running gateway and one attempt that is being served."""

    store: InMemoryLightningStore
    engine: ScriptedEngine
    gateway: Gateway
    rollout_id: str
    attempt_id: str

    async def another(self, mode: RolloutMode = RolloutMode.TRAIN) -> Site:
        """The same gateway with a fresh attempt."""
        claimed = await self.store.start_rollout(input={}, mode=mode)
        return Site(self.store, self.engine, self.gateway, claimed.rollout_id, claimed.attempt.attempt_id)

    @property
    def key(self) -> str:
        return self.gateway.key_for(self.rollout_id, self.attempt_id)

    @property
    def base_url(self) -> str:
        return self.gateway.as_resource().get_base_url(self.rollout_id, self.attempt_id)

    def client(self, **settings: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.base_url, api_key=self.key, max_retries=0, **settings)

    async def close(self) -> list[Call]:
        """Close the attempt; its calls as the store has them."""
        await self.gateway.close_attempt(self.rollout_id, self.attempt_id)
        return list((await self.store.query_calls([self.rollout_id]))[self.rollout_id])

    async def spans(self) -> list[Span]:
        return list(await self.store.query_spans(self.rollout_id, self.attempt_id))

    def check_exact(self, calls: list[Call]) -> None:
        """Every stored call holds exactly what the engine sampled."""
        for call in calls:
            prompt, response, logprobs = self.engine.sampled[call.info.call_id]
            assert call.prompt_ids.tolist() == prompt.tolist()
            assert call.response_ids.tolist() == response.tolist()
            assert call.plain_logprobs.tolist() == logprobs.tolist()
            assert call.logprobs.tolist() == (logprobs / 2).tolist()


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    found = InMemoryLightningStore()
    yield found
    await found.close()


@pytest.fixture
def script() -> Script:
    return calculator


@pytest.fixture
async def site(store: InMemoryLightningStore, rendering: RenderersRendering, script: Script) -> AsyncIterator[Site]:
    engine = ScriptedEngine(rendering, script)
    async with Gateway(store, engine, rendering, train_sampling={"temperature": 1.0}) as gateway:
        claimed = await store.start_rollout(input={}, mode=RolloutMode.TRAIN)
        yield Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
