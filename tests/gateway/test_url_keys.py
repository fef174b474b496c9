"""The base URL is enough: it attributes and authorises whatever key a client sends, and opens its own attempt only."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from agentlightning.algorithm.rollout_verdicts import never_called
from agentlightning.errors import AgentError
from agentlightning.gateway import Gateway
from agentlightning.keys import CALLS, REWARDS, redacted, sign_url_key
from agentlightning.rendering import RenderersRendering
from agentlightning.runner.endings import describe
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer.attribution import instrument, uninstrument
from agentlightning.types import LLM, AttemptStatus, Outcome
from tests.gateway.conftest import Site
from tests.gateway.scripted import Script, ScriptedEngine

ASK: Any = {"model": "policy", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 50}
CONCURRENT = 64


@pytest.fixture
def script() -> Script:
    """Says which task it was asked about."""
    return lambda prompt, _: "You said " + prompt.rpartition("My task is ")[2].partition("<|im_end|>")[0]


def given(site: Site, *scopes: str) -> LLM:
    """What the agent of this attempt is given."""
    return site.gateway.bind(site.gateway.as_resource(), site.rollout_id, site.attempt_id, scopes or (CALLS, REWARDS))


async def post(url: str, body: Any = None, **headers: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=ASK if body is None else body, headers=headers) as answer,
    ):
        return answer.status, await answer.text()


@pytest.mark.parametrize("key", ["dummy", "xxx", "empty", "sk-proj-1234", "agl-forged", None])
async def test_any_key_works_with_the_url_of_the_attempt(site: Site, key: str | None) -> None:
    llm = given(site)
    root = llm.endpoint.removesuffix("/v1")
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    for path in ("/chat/completions", "/v1/chat/completions", "/v1/v1/chat/completions", "/v1/messages", "/messages"):
        status, text = await post(root + path, **headers)
        assert status == 200, (path, text)
    if key is not None:
        async with openai.AsyncOpenAI(base_url=llm.get_base_url(), api_key=key, max_retries=0) as client:
            await client.chat.completions.create(**ASK)
        async with anthropic.AsyncAnthropic(base_url=root, api_key=key, max_retries=0) as client:
            await client.messages.create(**ASK)
        other = llm.for_agent("solver")
        async with openai.AsyncOpenAI(base_url=other.endpoint, api_key=key, max_retries=0) as client:
            await client.chat.completions.create(**ASK)
    calls = await site.close()
    assert len(calls) == (5 if key is None else 8)
    assert (calls[-1].info.agent == "solver") == (key is not None)


async def test_what_the_page_gives_to_an_agent_is_enough(site: Site, rendering: RenderersRendering) -> None:
    """The first block of docs/gateway.md, with a request in its place for one."""
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)[0]
    names: dict[str, Any] = {"post": post, "store": site.store, "engine": site.engine}
    names |= {"rollout_id": site.rollout_id, "attempt_id": site.attempt_id, "rendering": rendering}
    code = code.replace('load_rendering("path/to/model")', "rendering")
    code += '    answered = await post(f"{llm.get_base_url()}/chat/completions", authorization="Bearer dummy")\n'
    await eval(compile(code, "gateway.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    assert names["answered"][0] == 200, names["answered"]


async def test_a_proper_key_in_the_header_wins(site: Site) -> None:
    llm = given(site, CALLS)
    url = f"{llm.endpoint}/reward"
    assert (await post(url, {"reward": 1.0}))[0] == 403
    rich = site.gateway.key_for(site.rollout_id, site.attempt_id, (REWARDS,))
    assert (await post(url, {"reward": 1.0}, authorization=f"Bearer {rich}"))[0] == 200
    another = await site.another()
    assert (await post(f"{llm.endpoint}/chat/completions", authorization=f"Bearer {another.key}"))[0] == 403


async def test_no_other_url_opens_anything(site: Site) -> None:
    another = await site.another()
    root = site.gateway.endpoint.removesuffix("/v1")
    at = f"{root}/rollout/{site.rollout_id}/attempt/{site.attempt_id}"
    theirs = given(another).endpoint.rpartition("/key/")[2].removesuffix("/v1")
    mine = given(site, CALLS).endpoint.rpartition("/key/")[2].removesuffix("/v1")
    unsigned = sign_url_key(b"another secret", site.rollout_id, site.attempt_id, (CALLS,))
    refused = (
        theirs,
        unsigned,
        mine.replace("c-", "crx-"),
        mine.replace("c-", "-"),
        mine[:-1],
        "-",
        "c-",
        "%00",
        "ü",
    )
    for key in refused:
        status, text = await post(f"{at}/key/{key}/v1/chat/completions")
        assert status == 401, (key, text)
    assert (await post(f"{at}/v1/chat/completions", authorization="Bearer dummy"))[0] == 401
    assert await site.spans() == []
    assert f"No model call of the agent was answered: {len(refused) + 1} arrived at" in (
        never_called([], site.gateway.refused_requests).words
    )


async def test_a_url_ends_with_its_attempt(site: Site) -> None:
    llm = given(site)
    assert (await post(f"{llm.endpoint}/chat/completions"))[0] == 200
    await site.close()
    await site.store.update_attempt(
        site.rollout_id, site.attempt_id, status=AttemptStatus.SUCCEEDED, outcome=Outcome.OK
    )
    status, text = await post(f"{llm.endpoint}/chat/completions")
    assert status == 410, text
    async with Gateway(site.store, site.engine, site.engine.rendering, secret=site.gateway._secret) as later:  # pyright: ignore[reportPrivateUsage]
        moved = llm.endpoint.replace(site.gateway.endpoint.removesuffix("/v1"), later.endpoint.removesuffix("/v1"))
        assert (await post(f"{moved}/chat/completions"))[0] == 410


async def test_keys_are_never_printed_whole(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    llm = given(site)
    caplog.set_level(logging.INFO)
    instrument(lambda: None)
    try:
        async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key="none", max_retries=0) as client:
            await client.chat.completions.create(**ASK)
    finally:
        uninstrument()
    url_key = llm.endpoint.rpartition("/key/")[2].removesuffix("/v1")
    shown = [caplog.text, repr(llm), str(llm), describe(AgentError(f"no route to {llm.endpoint}, key {llm.api_key}"))]
    for path in ("/nothing", "/v1/nothing"):
        status, text = await post(llm.endpoint + path)
        assert status == 404
        shown.append(text)
    for text in shown:
        assert url_key not in text
        assert str(llm.api_key) not in text
    assert all(url_key[:4] in text for text in shown[:4]), "but one can tell which it was"
    assert redacted("agl-gateway-experiment in /key/abc") == "agl-gateway-experiment in /key/abc"


FETCH = """
const [base, task] = process.argv.slice(1);
const body = JSON.stringify({model: "policy", messages: [{role: "user", content: "My task is " + task}]});
const headers = {"content-type": "application/json", authorization: "Bearer dummy"};
const answer = await fetch(base + "/chat/completions", {method: "POST", headers, body});
console.log((await answer.json()).choices[0].message.content);
"""


def command(tool: str, base_url: str, task: str) -> list[str]:
    if tool == "node":
        return ["node", "--input-type=module", "-e", FETCH, base_url, task]
    body = {"model": "policy", "messages": [{"role": "user", "content": f"My task is {task}"}]}
    return [
        "curl",
        "-sS",
        f"{base_url}/chat/completions",
        "-H",
        "content-type: application/json",
        "-d",
        json.dumps(body),
    ]


@pytest.mark.slow
async def test_programs_in_other_languages_need_no_key(
    store: InMemoryLightningStore, rendering: RenderersRendering, script: Script
) -> None:
    """Curl and Node, 64 attempts at once, each told its base URL only."""
    tools = [tool for tool in ("curl", "node") if shutil.which(tool)]
    if not tools:
        pytest.skip("neither curl nor node is installed")
    engine = ScriptedEngine(rendering, script)
    async with Gateway(store, engine, rendering) as gateway:
        sites: list[Site] = []
        for _ in range(CONCURRENT):
            claimed = await store.start_rollout(input={})
            sites.append(Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id))

        async def ask(number: int, site: Site) -> None:
            arguments = command(tools[number % len(tools)], given(site).endpoint, f"t{number}.")
            process = await asyncio.create_subprocess_exec(*arguments, stdout=-1, stderr=-1)
            out, errors = await process.communicate()
            assert f"You said t{number}." in out.decode(), (out, errors)

        await asyncio.gather(*(ask(number, site) for number, site in enumerate(sites)))
        for number, site in enumerate(sites):
            (call,) = await site.close()
            assert f"My task is t{number}." in rendering.decode(call.prompt_ids)
