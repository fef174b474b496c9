"""Clients of no rollout go on from earlier answers by ids: of responses, and of the items in them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from agentlightning.errors import GatewayError
from agentlightning.gateway import Gateway
from agentlightning.gateway.history.answers import RecentAnswers
from agentlightning.gateway.serving.anonymous import AnonymousAccess
from agentlightning.gateway.serving.sessions import Sessions
from agentlightning.keys import new_key
from agentlightning.net.server import LoopServer
from agentlightning.rendering import RenderersRendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import AttemptStatus, Outcome, RolloutStatus
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
        sessions = Sessions(seconds, most=2)
        app = AnonymousAccess(gateway, store, None, answers=RecentAnswers(seconds=seconds), sessions=sessions)
        front = LoopServer(app, "127.0.0.1", 0, what="model", error=GatewayError, trusted=gateway.trusts)
        await front.start()
        try:
            yield Server(f"http://127.0.0.1:{front.port}", engine)
        finally:
            await front.stop()
            await app.close()
            assert {r.status for r in await store.query_rollouts()} <= {RolloutStatus.SUCCEEDED}


async def respond(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    create: Any = client.responses.create
    return await create(model="policy", tools=TOOLS, **fields)


def result(call: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call.call_id, "output": "5"}


async def test_where_any_key_is_taken_so_is_one_that_a_server_made(server: Server) -> None:
    """The training server looks at keys itself, and its own begin as those of attempts do."""
    async with server.client(new_key()) as client:
        assert (await respond(client, input=QUESTION)).output


@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)])
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
            (client, {"input": [{"type": "item_reference", "id": first.output[0].id + "9" * 5000}]}, "input[0]"),
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


HEADERS = ["x-claude-code-session-id", "x-session-id", "x-session-affinity", "session_id"]


async def calls_of(store: InMemoryLightningStore, number: int) -> list[list[Any]]:
    """The calls of each rollout, in its order, once so many are stored: sessions stay open, and what they recorded is
    written on its own time.
    """
    async with asyncio.timeout(20):
        while True:
            rollouts = await store.query_rollouts()
            found = await store.query_calls([rollout.rollout_id for rollout in rollouts])
            calls = [list(found[rollout.rollout_id]) for rollout in rollouts]
            if sum(map(len, calls)) >= number:
                return calls
            await asyncio.sleep(0.05)


async def told(server: Server, key: str, messages: Any, **headers: str) -> str:
    async with server.client(key) as client:
        create: Any = client.chat.completions.create
        answer = await create(model="policy", messages=messages, extra_headers=headers)
    return answer.choices[0].message.content


@pytest.mark.parametrize("header", HEADERS)
async def test_the_requests_of_a_session_are_one_attempt(
    server: Server, store: InMemoryLightningStore, header: str
) -> None:
    server.engine.script = lambda _prompt, _params: "It  is   5 ."
    ask: list[Any] = [{"role": "user", "content": QUESTION}]
    said = await told(server, "mine", ask, **{header: "s1"})
    more = [*ask, {"role": "assistant", "content": said}, *ask]
    await told(server, "mine", more, **{header: "s1"})
    await told(server, "mine", more, **{header: "s2"})
    await told(server, "other", more, **{header: "s1"})
    await told(server, "mine", more)
    found = sorted(await calls_of(store, 5), key=len)
    assert [len(calls) for calls in found] == [1, 1, 1, 2], "another key is another session"
    first, then = found[-1]
    assert then.info.parent_call_id == first.info.call_id
    known = [*first.prompt_ids.tolist(), *first.response_ids.tolist()]
    assert then.prompt_ids.tolist()[: len(known)] == known


async def test_first_calls_at_once_share_the_attempt(server: Server, store: InMemoryLightningStore) -> None:
    ask: list[Any] = [{"role": "user", "content": QUESTION}]
    headers = {"x-claude-code-session-id": "s"}
    await asyncio.gather(*(told(server, "mine", ask, **headers) for _ in range(5)))
    assert [len(calls) for calls in await calls_of(store, 5)] == [5]


async def test_a_session_whose_attempt_is_over_begins_another(server: Server, store: InMemoryLightningStore) -> None:
    ask: list[Any] = [{"role": "user", "content": QUESTION}]
    await told(server, "mine", ask, **{"x-session-id": "s"})
    (rollout,) = await store.query_rollouts()
    await store.update_attempt(rollout.rollout_id, "latest", status=AttemptStatus.SUCCEEDED, outcome=Outcome.OK)
    await told(server, "mine", ask, **{"x-session-id": "s"})
    assert [len(calls) for calls in await calls_of(store, 2)] == [1, 1]


async def test_sessions_end_unused_and_by_number(store: InMemoryLightningStore) -> None:
    now, ended, another = 0.0, list[str](), asyncio.Semaphore(0)

    async def end(rollout_id: str, _attempt_id: str) -> None:
        ended.append(rollout_id)
        another.release()

    sessions = Sessions(0.01, most=2, clock=lambda: now)
    started = list[str]()
    for name in "abcd":
        async with sessions.attempt(store, end, "key", name, "/v1") as (_, (rollout_id, _)):
            started.append(rollout_id)
    async with asyncio.timeout(20):
        await another.acquire()
        await another.acquire()
        assert ended == started[:2], "the oldest of too many"
        async with sessions.attempt(store, end, "key", "c", "/v1") as (_, (rollout_id, _)):
            assert rollout_id == started[2]
            now = 1.0
            await another.acquire()
            assert ended[2:] == [started[3]], "one in use stays"
        now = 2.0
        await another.acquire()
    await sessions.close(store, end)
    assert len(ended) == 4
    assert {r.status for r in await store.query_rollouts()} == {RolloutStatus.SUCCEEDED}


async def test_without_time_each_request_is_its_own(store: InMemoryLightningStore) -> None:
    ended = list[str]()

    async def end(rollout_id: str, _attempt_id: str) -> None:
        ended.append(rollout_id)

    for _ in range(2):
        async with Sessions().attempt(store, end, "key", "s", "/v1"):
            pass
    assert len(set(ended)) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", ["previous", "reference", "items"])
async def test_answers_that_go_on_by_ids_are_one_attempt_token_by_token(
    server: Server, store: InMemoryLightningStore, by: str, stream: bool
) -> None:
    """A chain of ids is a session, in which no text is encoded anew; another chain and another key are others."""
    server.engine.script = lambda _prompt, _params: "It  is   5 ."
    async with server.client("mine") as client, server.client("other") as other:
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        last: Any = None
        for _ in range(3):
            sent: dict[str, Any] = {"input": items}
            if by == "previous" and last is not None:
                sent = {"input": items[-1:], "previous_response_id": last.id}
            last = await whole_answer(client, stream, **sent)
            (said,) = last.output
            again = {"type": "item_reference", "id": said.id} if by == "reference" else said.to_dict()
            items += [again, {"role": "user", "content": "Sure?"}]
        await whole_answer(client, stream, input=QUESTION)
        await whole_answer(other, stream, input=QUESTION)
    found = sorted(await calls_of(store, 5), key=len)
    assert [len(calls) for calls in found] == [1, 1, 3]
    for before, call in zip(found[-1], found[-1][1:], strict=False):
        assert call.info.parent_call_id == before.info.call_id
        known = [*before.prompt_ids.tolist(), *before.response_ids.tolist()]
        assert call.prompt_ids.tolist()[: len(known)] == known


async def test_an_answer_that_is_not_stored_ends_its_attempt(server: Server, store: InMemoryLightningStore) -> None:
    async with server.client() as client:
        kept = await respond(client, input=QUESTION)
        unkept = await respond(client, input=QUESTION, store=False)
        ids = {c.info.response_id: c.info.rollout_id for calls in await calls_of(store, 2) for c in calls}
        (done,) = await store.wait_for_rollouts(rollout_ids=[ids[unkept.id]], timeout=20)
        waits = await store.get_rollout_by_id(ids[kept.id])
    assert (done.rollout_id, done.status) == (ids[unkept.id], RolloutStatus.SUCCEEDED)
    assert waits is not None
    assert waits.status is RolloutStatus.RUNNING


async def whole_answer(client: openai.AsyncOpenAI, stream: bool, **fields: Any) -> Any:
    if not stream:
        return await respond(client, **fields)
    events = [event async for event in await respond(client, stream=True, **fields)]
    return events[-1].response


async def test_two_chains_in_one_body_belong_to_the_one_that_it_continues(
    server: Server, store: InMemoryLightningStore
) -> None:
    async with server.client() as client:
        first, second = await respond(client, input=QUESTION), await respond(client, input="And 3 + 4?")
        reference = {"type": "item_reference", "id": second.output[0].id}
        await respond(
            client,
            previous_response_id=first.id,
            input=[result(first.output[0]), reference, result(second.output[0])],
        )
    by_response = {call.info.response_id: call for calls in await calls_of(store, 3) for call in calls}
    (third,) = [call for name, call in by_response.items() if name not in (first.id, second.id)]
    assert third.info.rollout_id == by_response[first.id].info.rollout_id
    assert third.info.rollout_id != by_response[second.id].info.rollout_id
