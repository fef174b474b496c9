"""Clients of no rollout go on from earlier answers by ids: of responses, and of the items in them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from agentlightning.errors import GatewayError
from agentlightning.gateway import Gateway
from agentlightning.gateway.history.answers import RecentAnswers
from agentlightning.gateway.serving.anonymous import AnonymousAccess
from agentlightning.rendering import RenderersRendering
from agentlightning.serving import LoopServer
from agentlightning.store import InMemoryLightningStore
from tests.gateway.conftest import CALC, calculator
from tests.gateway.scripted import ScriptedEngine

TOOLS: list[Any] = [{"type": "function", **CALC["function"]}]
QUESTION = "What is 2 + 3?"


class Server:
    """What `agl serve` puts in front of a gateway."""

    def __init__(self, url: str, engine: ScriptedEngine) -> None:
        self.url = url
        self.engine = engine

    def client(self, key: str = "any") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def seconds() -> float:
    return 3600.0


@pytest.fixture
async def server(store: InMemoryLightningStore, rendering: RenderersRendering, seconds: float) -> AsyncIterator[Server]:
    engine = ScriptedEngine(rendering, calculator)
    async with Gateway(store, engine, rendering) as gateway:
        app = AnonymousAccess(gateway, store, None, answers=RecentAnswers(seconds=seconds))
        front = LoopServer(app, "127.0.0.1", 0, what="model", error=GatewayError, trusted=gateway.trusts)
        await front.start()
        try:
            yield Server(f"http://127.0.0.1:{front.port}", engine)
        finally:
            await front.stop()


async def respond(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    create: Any = client.responses.create
    return await create(model="policy", tools=TOOLS, **fields)


def result(call: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call.call_id, "output": "5"}


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("by", ["previous", "reference", "items", "unmarked"])
async def test_a_conversation_goes_on_by_ids(server: Server, by: str, large: bool) -> None:
    """As the prompt is when all of it is sent."""
    more: dict[str, Any] = {"metadata": {"padding": " " * 200_000}} if large else {}
    script = server.engine.script
    prompts: list[str] = []

    def noted(prompt: str, params: Any) -> str:
        prompts.append(prompt)
        return script(prompt, params)

    server.engine.script = noted
    async with server.client() as client:
        first = await respond(client, input=QUESTION)
        (call,) = first.output
        if by == "previous":
            second = await respond(client, previous_response_id=first.id, input=[result(call)], **more)
        else:
            marked = {} if by == "unmarked" else {"type": "item_reference"}
            item = call.model_dump(exclude_none=True) if by == "items" else {"id": call.id, **marked}
            sent = [{"role": "user", "content": QUESTION}, item, result(call)]
            second = await respond(client, input=sent, **more)
        await respond(
            client, input=[{"type": "item_reference", "id": second.output[0].id}, {"role": "user", "content": "So?"}]
        )
    whole = prompts[1]
    assert whole.count("<tool_response>") == 1
    assert '"a":2' in whole.replace(" ", "")
    assert whole.index(QUESTION) < whole.index('"a"', whole.index(QUESTION)) < whole.index("<tool_response>")
    assert second.output[0].content[0].text in prompts[2]


async def test_what_is_not_kept_is_refused_with_what_to_do(server: Server) -> None:
    async with server.client() as client, server.client("another") as other:
        first = await respond(client, input=QUESTION)
        unkept = await respond(client, input=QUESTION, store=False)
        reference = {"type": "item_reference", "id": first.output[0].id}
        await respond(client, input=[reference, result(first.output[0])])
        for who, fields, param in (
            (other, {"previous_response_id": first.id, "input": "x"}, "previous_response_id"),
            (other, {"input": [reference]}, "input[0]"),
            (client, {"previous_response_id": unkept.id, "input": "x"}, "previous_response_id"),
            (client, {"input": [{"type": "item_reference", "id": unkept.output[0].id}]}, "input[0]"),
            (client, {"input": [{"type": "item_reference", "id": "msg_" + "0" * 32}]}, "input[0]"),
            (client, {"input": [{"type": "item_reference", "id": first.output[0].id + "9"}]}, "input[0]"),
            (client, {"input": [{"type": "item_reference", "id": ""}]}, "input[0]"),
        ):
            with pytest.raises(openai.BadRequestError, match="Send the conversation itself") as refused:
                await respond(who, **fields)
            assert refused.value.param == param


@pytest.mark.parametrize("seconds", [0.0])
async def test_answers_are_kept_no_longer_than_told(server: Server) -> None:
    async with server.client() as client:
        first = await respond(client, input=QUESTION)
        with pytest.raises(openai.BadRequestError):
            await respond(client, previous_response_id=first.id, input="x")


def test_answers_are_bounded_in_number_size_and_time() -> None:
    now = 0.0
    answers = RecentAnswers(seconds=10, most=3, characters=3000, clock=lambda: now)
    mine, others = answers.of(b"me"), answers.of(b"you")
    for name in "abcd":
        mine[name] = [{"role": "user", "content": name}]
    assert (list(mine), list(others)) == (["b", "c", "d"], [])
    others["e"] = [{"role": "user", "content": "x" * 2500}]
    assert (list(mine), list(others)) == (["d"], ["e"])
    mine["f"] = [{"role": "user", "content": "x" * 5000}]
    assert (list(mine), list(others)) == ([], []), "what is too large by itself is not kept"
    mine["g"] = [{"role": "user", "content": "x"}]
    now = 10.0
    assert mine.get("g") is None


async def test_every_answer_names_its_request_and_errors_have_the_clients_shape(server: Server) -> None:
    ask = {"model": "policy", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    seen = set[str]()
    async with aiohttp.ClientSession() as http:
        for method, path, body, headers, status in (
            ("POST", "/v1/chat/completions", ask, {}, 200),
            ("POST", "/v1/chat/completions", {**ask, "stream": True}, {}, 200),
            ("POST", "/v1/messages", ask, {}, 200),
            ("POST", "/v1/messages", {}, {}, 400),
            ("GET", "/v1/no/such/thing", None, {}, 404),
            ("GET", "/v1/no/such/thing", None, {"anthropic-version": "2023-06-01"}, 404),
            ("GET", "/api/hello", None, {}, 200),
            ("HEAD", "/api/hello", None, {}, 200),
        ):
            async with http.request(method, server.url + path, json=body, headers=headers) as answer:
                text = await answer.text()
                assert answer.status == status, text
                name = answer.headers["x-request-id"]
                assert name == answer.headers["request-id"]
                seen.add(name)
                if status >= 400:
                    anthropic = path == "/v1/messages" or bool(headers)
                    assert ('"type":"error"' in text) == anthropic
    assert len(seen) == 8


async def test_only_calls_of_models_begin_rollouts(server: Server, store: InMemoryLightningStore) -> None:
    async with aiohttp.ClientSession() as client:
        for path in ("/v1/nothing", "/", "/v1/threads", "/admin", "/v1/chat/completions/x", "/v1/models"):
            async with client.post(f"{server.url}{path}", json={}) as answer:
                assert answer.status in (200, 404), path
    assert not await store.query_rollouts()
    async with server.client() as client:
        await respond(client, input=QUESTION)
    assert len(await store.query_rollouts()) == 1
