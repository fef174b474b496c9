"""What one request may be at most: each limit is named by the refusal, and what is repeated is stored once."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest

from agentlightning.adapter.conversations import conversations
from agentlightning.engine.base import EngineInfo
from agentlightning.errors import ConfigError
from agentlightning.gateway import Gateway, RequestLimits
from agentlightning.gateway.limits import _elements  # pyright: ignore[reportPrivateUsage]
from agentlightning.models import resolve_model
from agentlightning.rendering import RenderersRendering
from agentlightning.store import InMemoryLightningStore
from tests.gateway.conftest import CALC, Site, calculator
from tests.gateway.scripted import ScriptedEngine

USER: Any = {"role": "user", "content": "What is 2 + 3?"}
ASK: Any = {"model": "policy", "messages": [USER], "max_tokens": 50}
SMALL = RequestLimits(
    body_bytes=2**20, elements=1000, containers=920, stop_strings=4, stop_characters=40, open_requests=2
)


@pytest.fixture
async def limited(store: InMemoryLightningStore, rendering: RenderersRendering) -> Any:
    engine = ScriptedEngine(rendering, calculator)
    async with Gateway(store, engine, rendering, request_limits=SMALL) as gateway:
        claimed = await store.start_rollout(input={})
        yield Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)


async def post(site: Site, path: str, body: Any) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {site.key}", "content-type": "application/json"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{site.base_url}{path}", data=io.BytesIO(data)) as answer,
    ):
        return answer.status, await answer.text()


REFUSED: list[tuple[Any, int, str]] = [
    ({**ASK, "user": "x" * 2**20}, 413, "body_bytes"),
    ({**ASK, "metadata": [[]] * 2000}, 413, "elements"),
    ({**ASK, "metadata": {str(i): {} for i in range(2000)}}, 413, "elements"),
    ({**ASK, "stop": ["a", "b", "c", "d", "e"]}, 400, "stop_strings"),
    ({**ASK, "stop": "x" * 41}, 400, "stop_characters"),
    (b"[" * 900_000, 413, "elements"),
    (b'{"model": "policy", "x": ' + b"[" * 950, 413, "containers"),
    (b'{"model": "policy", "x": ' + b"[" * 900, 400, "JSON"),
]


async def test_a_limit_is_named_by_what_it_refuses(limited: Site) -> None:
    for body, expected, named in REFUSED:
        status, text = await post(limited, "/chat/completions", body)
        assert (status, named in text) == (expected, True), (named, text)
    assert (await post(limited, "/chat/completions", ASK))[0] == 200


@pytest.mark.parametrize("declared", [True, False], ids=["length declared", "in chunks"])
async def test_a_client_that_writes_megabytes_too_many_reads_why_they_are_refused(
    limited: Site, declared: bool
) -> None:
    """It writes all of it before it reads; what it wrote is taken in, and the connection goes on."""
    port = urlsplit(limited.gateway.endpoint).port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nauthorization: Bearer {limited.key}\r\n"
    head += "content-type: application/json\r\n"
    piece = b"x" * 2**20
    async with asyncio.timeout(60):
        how = f"content-length: {8 * len(piece)}" if declared else "transfer-encoding: chunked"
        writer.write(f"{head}{how}\r\n\r\n".encode())
        for _ in range(8):
            writer.write(piece if declared else f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
        writer.write(b"" if declared else b"0\r\n\r\n")
        status, text = await _answer(reader)
        assert (status, "body_bytes" in text) == (413, True), text
        body = json.dumps(ASK).encode()
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert (await _answer(reader))[0] == 200
    writer.close()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, str]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None, head
    return int(head.split(b" ")[1]), (await reader.readexactly(int(length[1]))).decode()


async def test_rewards_are_small(limited: Site) -> None:
    status, text = await post(limited, "/reward", b'{"reward": [' + b"[]," * 30_000 + b"[]]}")
    assert (status, "body_too_large" in text) == (413, True), text


async def test_texts_full_of_commas_are_no_elements(limited: Site) -> None:
    text = r'[{"a": [1, 2, "\\"]},{ "b": "\\\"" }, ' * 500
    body = {**ASK, "user": text}
    assert (await post(limited, "/chat/completions", body))[0] == 200


def _count(value: Any) -> int:
    """Commas and opening brackets that `json.dumps` writes outside of texts."""
    if isinstance(value, dict | list):
        inside = list(value.values()) if isinstance(value, dict) else value
        return 1 + max(0, len(inside) - 1) + sum(map(_count, inside))
    return 0


@pytest.mark.parametrize("pad", [0, 1, 2, 3])
def test_elements_are_counted_outside_of_texts_only(pad: int) -> None:
    odd = ['"', "\\", '\\"', "[,{", '"[', "\\\\", "é,"]
    value = {"pad": "x" * pad, "rows": [[a + b * 40, {a: [b, {}]}] for a in odd for b in odd] * 400}
    body = json.dumps(value).encode()
    assert len(body) > 2**20, "it goes over the border of a block"
    elements, containers = _elements(body, 10**9)
    assert elements == _count(value)
    assert containers == 1 + 1 + 400 * len(odd) ** 2 * 4


async def test_an_attempt_may_have_so_many_requests_open(limited: Site) -> None:
    limited.engine.open.clear()
    waiting = [asyncio.create_task(post(limited, "/chat/completions", ASK)) for _ in range(2)]
    async with asyncio.timeout(30):
        while len(limited.engine.params) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    status, text = await post(limited, "/chat/completions", ASK)
    assert (status, "open_requests" in text) == (429, True), text
    other = await limited.another()
    third = asyncio.create_task(post(other, "/chat/completions", ASK))
    limited.engine.open.set()
    assert [status for status, _ in await asyncio.gather(*waiting, third)] == [200, 200, 200]


HUGE = "word, " * 200_000
LONG_ROWS: dict[str, Callable[[], Any]] = {
    "count_tokens": lambda: {**ASK, "messages": [{"role": "user", "content": HUGE}]},
    "description": lambda: {**ASK, "tools": [{"name": "t", "description": HUGE, "input_schema": {}}]},
    "schema": lambda: {
        **ASK,
        "tools": [{"name": "t", "input_schema": {"type": "object", "description": HUGE}}],
    },
    "arguments": lambda: {
        **ASK,
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "t", "input": {"a": HUGE}}]},
            USER,
        ],
    },
    "messages": lambda: {**ASK, "messages": [USER] * 19_000},
}


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/messages", pytest.param("/messages/count_tokens", marks=pytest.mark.slow)])
async def test_what_is_too_long_is_refused_wherever_it_stands(site: Site, path: str) -> None:
    for where, row in LONG_ROWS.items():
        body = row()
        if path.endswith("count_tokens"):
            del body["max_tokens"]
        status, text = await post(site, path, body)
        assert (status, "prompt is too long" in text) == (400, True), (where, text[:300])
    assert not site.engine.params


async def test_many_short_messages_are_refused_by_their_number_before_any_is_tokenised(site: Site) -> None:
    messages = [{"role": "user", "content": "?"}] * (site.engine.max_context // 2)
    status, text = await post(site, "/chat/completions", {"model": "policy", "messages": messages})
    assert (status, "prompt is too long" in text) == (400, True), text[:300]
    said = int(re.search(r"too long: (\d+) tokens", text)[1])  # pyright: ignore[reportOptionalSubscript]
    assert site.engine.max_context <= said < len(site.engine.rendering.render(messages, None))


async def test_prompts_somewhat_over_the_context_are_still_counted(site: Site) -> None:
    text = "word, " * (2 * site.engine.max_context // 6)
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    status, answer = await post(site, "/messages/count_tokens", body)
    assert status == 200, answer
    ids = site.engine.rendering.render(body["messages"], None)
    assert json.loads(answer)["input_tokens"] == len(ids)


def test_long_texts_have_the_tokens_they_had(rendering: RenderersRendering) -> None:
    """They are encoded in another way, which leaves the interpreter to others."""
    text = "Ünï, 12 + 3 = 15. <think>\n" * 2000
    tokenizer = rendering._tokenizer._tokenizer  # pyright: ignore[reportPrivateUsage]
    assert rendering.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids
    count = len(rendering.encode(text))
    assert not rendering.exceeds([text], count, lambda: False)
    assert rendering.exceeds([text], count // 2, lambda: False)
    assert not rendering.exceeds([text], count // 2, lambda: True), "nobody waits for it"


async def test_what_a_request_says_is_stored_once_whatever_n(site: Site) -> None:
    thought = {"role": "assistant", "content": "5", "reasoning_content": "so " * 300}
    body = {**ASK, "messages": [USER, thought, USER], "tools": [CALC], "n": 16}
    status, text = await post(site, "/chat/completions", body)
    assert status == 200, text
    calls = await site.close()
    spans = await site.spans()
    assert len(calls) == len(spans) == 16
    assert sum("so so so" in json.dumps(dict(span.attributes)) for span in spans) == 1
    found = conversations(spans)
    assert len(found) == 16
    assert all([m["content"] for m in c.messages] == [m["content"] for m in found[0].messages] for c in found)
    assert all(len(c.messages) == 3 and c.tools for c in found)


async def test_any_choice_is_continued_after_a_restart(site: Site) -> None:
    site.engine.script = lambda _prompt, _params: f"It is {len(site.engine.params)}."
    _, text = await post(site, "/chat/completions", {**ASK, "n": 3})
    said = json.loads(text)["choices"][2]["message"]["content"]
    await site.gateway.stop()
    async with Gateway(site.store, site.engine, site.engine.rendering) as later:
        again = Site(site.store, site.engine, later, site.rollout_id, site.attempt_id)
        messages = [USER, {"role": "assistant", "content": said}, USER]
        assert (await post(again, "/chat/completions", {**ASK, "messages": messages}))[0] == 200
        calls = await again.close()
    by_id = {call.info.call_id: call for call in calls}
    (last,) = [call for call in calls if call.info.parent_call_id]
    assert last.info.parent_call_id in by_id
    assert last.info.parent_call_id.endswith(":2")


class PathEngine(ScriptedEngine):
    """Served from a directory."""

    async def info(self) -> EngineInfo:
        return msgspec.structs.replace(await super().info(), model=resolve_model("calc"))


async def test_no_path_of_this_machine_is_shown(store: InMemoryLightningStore, rendering: RenderersRendering) -> None:
    async with Gateway(store, PathEngine(rendering, calculator), rendering) as gateway:
        claimed = await store.start_rollout(input={})
        site = Site(store, PathEngine(rendering, calculator), gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        status, text = await post(site, "/chat/completions", {**ASK, "model": "gpt"})
        assert status == 404
        async with aiohttp.ClientSession() as session, session.get(f"{gateway.endpoint}/models") as answer:
            listed = await answer.text()
        for shown in (text, listed):
            assert "policy" in shown
            assert resolve_model("calc") not in shown
        assert (await post(site, "/chat/completions", {**ASK, "model": resolve_model("calc")}))[0] == 200


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="elements"):
        RequestLimits(elements=0)
