"""Bytes that are nearly a request: whatever is broken in them, the answer is a 4xx or an answer, and never a 500."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.gateway.conftest import CALC, Site
from tests.gateway.test_mutations import CHAT, COMPLETIONS, MESSAGES, RESPONSES, places, replaced

USER: Any = {"role": "user", "content": "What is 2 + 3?"}
BIG = 2**100
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer", "maximum": BIG}}}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
PIECES = [b"", b"\xff", b'"', b"{", b"[1e999]", b"\\u", str(BIG).encode()]
PATHS = {
    "/chat/completions": {"model": "policy", "messages": [USER], "tools": [CALC], "max_tokens": 8},
    "/messages": {"model": "policy", "messages": [USER], "max_tokens": 8},
    "/responses": {"model": "policy", "input": "hi", "max_output_tokens": 8},
    "/completions": {"model": "policy", "prompt": "hi", "max_tokens": 8},
}


async def status(site: Site, path: str, body: bytes) -> tuple[int, str]:
    headers = {"authorization": f"Bearer {site.key}", "content-type": "application/json"}
    sending = aiohttp.ClientSession(headers=headers)
    async with sending as session, session.post(site.base_url + path, data=body) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize("path", PATHS)
async def test_what_is_no_utf8_is_refused(site: Site, path: str) -> None:
    body = json.dumps(PATHS[path]).encode()
    for broken in (b'"\xff"', b'"\xc3("', b'"\xed\xa0\x80"', b'"\\ud800"', b'"a\\u0000"'):
        code, text = await status(site, path, body[:-1] + b', "user": ' + broken + b"}")
        assert code in (200, 400), text
        code, text = await status(site, path, body.replace(b'"hi"', broken).replace(b'"What is 2 + 3?"', broken))
        assert code in (200, 400), text


@pytest.mark.parametrize(
    "fields", [{"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "required"}, {"response_format": FORMAT}]
)
async def test_integers_of_a_schema_beyond_64_bits_are_no_fault_of_ours(site: Site, fields: Any) -> None:
    body = {**PATHS["/chat/completions"], **fields}
    code, text = await status(site, "/chat/completions", json.dumps(body).encode())
    assert code in (200, 400), text


ODD: Any = {"type": "object", "properties": {"a": {"enum": [BIG]}}, "patternProperties": {"^x": {"const": -BIG}}}


@pytest.mark.parametrize("padding", [0, pytest.param(300_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": ODD}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": ODD}}], "tool_choice": "required"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ODD}}},
        {"seed": BIG},
        {"metadata": {"a": BIG}},
        {"logit_bias": {"5": BIG}},
        {"chat_template_kwargs": {"a": BIG}},
    ],
)
async def test_integers_beyond_64_bits_are_no_fault_of_the_process_for_large_requests(
    site: Site, fields: Any, padding: int
) -> None:
    """A schema that is not simple and a request that is large are read in a process beside the gateway."""
    body = {**PATHS["/chat/completions"], **fields, "user": "x" * padding}
    code, text = await status(site, "/chat/completions", json.dumps(body).encode())
    assert code in (200, 400), text


NESTED = {
    "chat/completions": {k: v for k, v in CHAT.items() if k not in ("tool_choice", "response_format")},
    "messages": {k: v for k, v in MESSAGES.items() if k not in ("tool_choice", "output_config")},
    "responses": {k: v for k, v in RESPONSES.items() if k != "text"},
    "completions": COMPLETIONS,
}


@pytest.mark.slow
@pytest.mark.quick_with("chat", "messages-450")
@pytest.mark.parametrize("depth", [90, 450, pytest.param(900, marks=pytest.mark.slow), 5_000])
@pytest.mark.parametrize("path", NESTED)
async def test_what_is_nested_deep_is_answered_or_refused_wherever_it_stands(site: Site, path: str, depth: int) -> None:
    """Every function on a value's way may go as deep as the value: of the reader, of renderings, of what is stored."""
    site.engine.script = lambda _prompt, _params: "yes"
    body = {**NESTED[path], "model": "policy"}
    deep = '[{"a": ' * (depth // 2) + "1" + "}]" * (depth // 2)
    found = Counter[int]()
    for place in places(body):
        text = json.dumps(replaced(body, place, "DEEP")).replace('"DEEP"', deep)
        code, answer = await status(site, f"/{path}", text.encode())
        assert code in (200, 400), (place, answer[:300])
        found[code] += 1
    assert found[400]


@pytest.mark.parametrize("path", PATHS)
async def test_corrupted_requests(site: Site, path: str) -> None:
    """Bytes cut out, doubled, and replaced, of requests of each wire format."""
    chance, body = (
        random.Random(path),
        json.dumps({**PATHS[path], "stop": ["x"], "metadata": {"é": [1.5, None]}}).encode(),
    )
    for _ in range(60):
        broken = bytearray(body)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(broken))
            piece = chance.choice([*PIECES, bytes(broken[at : at + 9])])
            broken[at : at + chance.randint(0, 3)] = piece
        async with asyncio.timeout(10):
            code, text = await status(site, path, bytes(broken))
        assert code < 500, (bytes(broken), text)


SERVER = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from agentlightning.store import LightningStoreServer, SqliteLightningStore

async def main():
    server = LightningStoreServer(SqliteLightningStore(sys.argv[1]), port=0)
    await server.start()
    print(server.endpoint, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_slow_clients_do_not_take_a_store_of_few_descriptors(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER, str(tmp_path / "store.db")), stdin=asyncio.subprocess.PIPE, stdout=-1
    )
    assert process.stdin is not None
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    port = int(url.rpartition(":")[2])
    slow = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(150)]
    async with asyncio.timeout(30), aiohttp.ClientSession(url) as session:
        for _ in range(3):
            async with session.post("/v1/agl/queues/rollouts/enqueue", json={"rollouts": [{"input": 1}]}) as answer:
                assert answer.status == 200, await answer.text()
    for writer in slow:
        writer.close()
    process.stdin.close()
    assert await process.wait() == 0
