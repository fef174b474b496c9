"""A wire format that the package does not know: one object given to the gateway, for its own models and for others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
import pytest

from agentlightning.errors import ConfigError
from agentlightning.gateway import DIALECTS, Gateway, Provider
from agentlightning.gateway.dialects.base import Answered, Dialect, Fields, StreamWriter
from agentlightning.gateway.dialects.chat import ChatDialect
from agentlightning.gateway.dialects.fields import Reading, required, typed
from agentlightning.gateway.exchange import Answer, CallRequest, Choice, Delta, Refusal
from agentlightning.rendering import Message, RenderersRendering, Rendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import RolloutMode
from tests.gateway.conftest import Site
from tests.gateway.scripted import ScriptedEngine


class Lines:
    """The answer's text as it comes, without any events."""

    def start(self, prompt_tokens: int) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        return delta.content.encode()

    def choice(self, choice: Choice) -> bytes:
        return b""

    def finish(self, reply: Answer) -> bytes:
        return b"\n"

    def fail(self, refusal: Refusal) -> bytes:
        return refusal.message.encode()


class ParlourDialect(Dialect):
    """`POST /parlour`: one question, one answer."""

    name = "parlour"
    title = "Parlour"
    paths = ("/parlour",)
    id_prefix = "parlour-"
    fields = Fields(honoured=("model", "question", "stream"), harmless=("mood",))
    conversation_fields = ("question",)

    def parse(self, body: Mapping[str, Any], answered: Answered) -> CallRequest:
        reading = Reading()
        reading.check(body, self.fields)
        return CallRequest(
            dialect=self.name,
            model=required(body, "model", str),
            messages=[{"role": "user", "content": required(body, "question", str)}],
            stream=typed(body, "stream", bool, False),
            left_out=reading.left_out,
        )

    def respond(self, request: CallRequest, reply: Answer, rendering: Rendering) -> bytes:
        return msgspec.json.encode({"answer": reply.choices[0].content})

    def writer(self, request: CallRequest, response_id: str, created: int, rendering: Rendering) -> StreamWriter:
        return Lines()

    def refuse(self, refusal: Refusal) -> bytes:
        return msgspec.json.encode({"sorry": refusal.message})

    def credentials(self, api_key: str | None) -> dict[str, str]:
        return {"x-api-key": api_key or ""}

    def answer_message(self, answer: Mapping[str, Any]) -> Message:
        return {"role": "assistant", "content": answer["answer"]}


def hello(_prompt: str, _params: object) -> str:
    return "Good evening."


async def test_a_dialect_of_ones_own_is_spoken_recorded_and_forwarded(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    dialects = (*DIALECTS, ParlourDialect())
    engine = ScriptedEngine(rendering, hello)
    async with Gateway(store, engine, rendering, dialects=dialects) as behind:
        far = await store.start_rollout(input={}, mode=RolloutMode.TRAIN)
        key = behind.key_for(far.rollout_id, far.attempt.attempt_id)
        provider = Provider(base_url=behind.endpoint, model="policy", api_key=key)
        async with Gateway(store, engine, rendering, dialects=dialects, models={"other": provider}) as gateway:
            near = await store.start_rollout(input={}, mode=RolloutMode.TRAIN)
            site = Site(store, engine, gateway, near.rollout_id, near.attempt.attempt_id)
            headers = {"authorization": f"Bearer {site.key}"}
            async with aiohttp.ClientSession(headers=headers) as client:
                for asked, status, said in (
                    ({"model": "policy", "question": "?", "mood": "mild"}, 200, b'{"answer":"Good evening."}'),
                    ({"model": "policy", "question": "?", "stream": True}, 200, b"Good evening.\n"),
                    ({"model": "other", "question": "Forwarded?"}, 200, b'{"answer":"Good evening."}'),
                    ({"model": "policy", "question": "?", "port": 1}, 200, b'{"answer":"Good evening."}'),
                    ({"model": "policy", "question": 1}, 400, b'{"sorry":'),
                ):
                    async with client.post(f"{site.base_url}/parlour", json=asked) as response:
                        assert (response.status, (await response.read())[: len(said)]) == (status, said)
            calls = await site.close()
            site.check_exact(calls)
            assert [call.info.dialect for call in calls] == ["parlour", "parlour", "parlour"]
            (forwarded,) = [s for s in await site.spans() if s.attributes.get("agentlightning.dialect") == "parlour"]
            assert "Forwarded?" in str(forwarded.attributes["gen_ai.input.messages"])
            assert "Good evening." in str(forwarded.attributes["gen_ai.output.messages"])


def test_two_dialects_of_one_path_are_refused(store: InMemoryLightningStore, rendering: RenderersRendering) -> None:
    with pytest.raises(ConfigError, match="/chat/completions"):
        Gateway(store, ScriptedEngine(rendering, hello), rendering, dialects=(*DIALECTS, ChatDialect()))
