"""A short run of the fuzzer of the wire formats: each request is answered or refused, and none is a fault of ours."""

from __future__ import annotations

import asyncio
import itertools
import json

import aiohttp
import pytest

from agentlightning.rendering import RenderersRendering
from scripts.fuzz import SAID, fields_by_path
from scripts.grammar import BODIES, Grammar
from tests.gateway.conftest import CALC, Site

said = itertools.cycle(SAID)


@pytest.mark.quick_with("1-")
@pytest.mark.parametrize("script", [lambda *_: next(said)], ids=["odd answers"])
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_no_request_of_the_grammar_is_a_fault_of_ours(site: Site, seed: int) -> None:
    grammar, answered = Grammar(seed, fields_by_path()), None
    paths, statuses = set[str](), set[int]()
    headers = {"authorization": f"Bearer {site.key}", "content-type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for _ in range(60):
            path, body = grammar.request(answered)
            base = site.base_url.removesuffix("/v1") + "/v1beta" if path.startswith("/models/") else site.base_url
            async with asyncio.timeout(60), session.post(base + path, data=body) as answer:
                text = await answer.text()
            assert answer.status < 500, f"{path} {body.decode()}\n{text}"
            paths.add(path)
            statuses.add(answer.status)
            if path == "/responses" and answer.status == 200 and text.startswith("{"):
                answered = json.loads(text)["id"]
    assert paths >= BODIES.keys()
    assert {200, 400} <= statuses


@pytest.mark.parametrize("name", ["5", "[1]", "null", '""', '{"a": 1}', "true"])
def test_a_call_whose_name_is_no_text_is_no_call(rendering: RenderersRendering, name: str) -> None:
    """It would be in the history of the next request, where names are texts."""
    text = f'<tool_call>\n{{"name": {name}, "arguments": {{}}}}\n</tool_call>'
    prompt = rendering.render([{"role": "user", "content": "x"}], [CALC])
    parsed = rendering.parse(rendering.encode(text), prompt, [CALC])
    assert parsed.tool_calls == ()
    assert parsed.content == text, "what the model got wrong stays to be seen"
