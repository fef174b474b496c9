"""Endpoints among the initial resources: asked through the gateway, under the names and with the keys agents expect."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

import agentlightning as agl
from agentlightning.algorithm.base import PolicySpec
from agentlightning.backend import ModelSpec
from agentlightning.errors import ConfigError
from agentlightning.gateway.settings import CallSettings
from agentlightning.metrics import SilentConsole
from agentlightning.store import InMemoryLightningStore
from agentlightning.trainer.endpoints import given_endpoints
from agentlightning.types import NamedResources

POLICY = PolicySpec(ModelSpec(model="some/base"), CallSettings(), "embedded")


def llm(model: str = "theirs", host: str = "one", **given: Any) -> agl.LLM:
    return agl.LLM(endpoint=f"http://{host}/v1", model=model, **given)


@pytest.mark.parametrize(
    ("given", "models", "policy", "aliases"),
    [
        ({"llm": llm()}, [], None, {"llm": "theirs"}),
        ({"llm": llm(), "judge": llm()}, [], None, {"llm": "theirs", "judge": "theirs"}),
        ({"llm": llm(), "judge": llm(host="two")}, [], None, {"llm": "theirs", "judge": "judge"}),
        ({"llm": llm()}, ["theirs"], None, {"llm": "llm"}),
        ({"judge": llm()}, ["theirs", "judge"], None, {"judge": "judge-2"}),
        ({"judge": llm("llm")}, [], POLICY, {"judge": "judge"}),
        ({"llm": llm("")}, [], None, {"llm": "llm"}),
        ({"judge": llm("some/base")}, [], POLICY, {"judge": "judge"}),
        ({"judge": llm("policy")}, [], POLICY, {"judge": "judge"}),
        ({"llm": llm(), "main_llm": llm(), "judge": llm()}, [], POLICY, {"judge": "theirs"}),
        ({"p": agl.PromptTemplate(template="x"), "q": agl.ProxyLLM(endpoint="http://g/v1", model="m")}, [], None, {}),
    ],
)
def test_an_endpoint_is_known_by_its_models_name(
    given: NamedResources, models: list[str], policy: PolicySpec | None, aliases: dict[str, str]
) -> None:
    endpoints = given_endpoints(given, models, policy)
    assert {name: alias for name, (alias, _) in endpoints.endpoints.items()} == aliases
    assert set(endpoints.providers) == set(aliases.values())
    assert sorted(endpoints.left_out) == [n for n in given if policy is not None and n in ("llm", "main_llm")]


def test_an_endpoint_that_is_no_url_is_named() -> None:
    given = {"judge": agl.LLM(endpoint="localhost:8000/v1", model="m")}
    with pytest.raises(ConfigError, match=r"initial_resources has 'judge'.*begins with http://"):
        given_endpoints(given, [], None)


@pytest.fixture
async def provider() -> AsyncIterator[tuple[str, list[tuple[str, str, dict[str, Any]]]]]:
    """A provider's URL, and what it was asked: path, key and body."""
    heard: list[tuple[str, str, dict[str, Any]]] = []

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        heard.append((request.path, request.headers.get("Authorization", "none"), body))
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        if request.path.endswith("/embeddings"):
            vector = {"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}
            return web.json_response({"object": "list", "model": "theirs", "data": [vector], "usage": usage})
        message = {"role": "assistant", "content": "Forty-two."}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        whole = {"id": "a", "object": "chat.completion", "created": 1, "model": "theirs", "choices": [choice]}
        return web.json_response({**whole, "usage": usage})

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield f"http://127.0.0.1:{port}/v1", heard
    await runner.cleanup()


async def test_agents_ask_it_as_if_directly_and_what_is_said_is_recorded(
    tmp_path: Path, provider: tuple[str, list[Any]]
) -> None:
    url, heard = provider
    seen: list[agl.LLM] = []

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> float:
        seen.append(llm)
        async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key="sk-own") as client:
            said = await client.chat.completions.create(
                model="theirs", messages=[{"role": "user", "content": task}], **llm.sampling_parameters
            )
            vectors = await client.embeddings.create(model=llm.model, input=task, encoding_format="float")
        assert vectors.data[0].embedding == [0.5, 0.25]
        return float(said.choices[0].message.content == "Forty-two.")

    store = InMemoryLightningStore()
    given = {"main_llm": agl.LLM(endpoint=url, model="theirs", sampling_parameters={"temperature": 0.5})}
    trainer = agl.Trainer(store=store, initial_resources=given, run_dir=tmp_path / "run", console=SilentConsole())
    await trainer.fit_async(agent, ["What is 6 * 7?"])
    assert [(path, key) for path, key, _ in heard] == [
        ("/v1/chat/completions", "Bearer sk-own"),
        ("/v1/embeddings", "Bearer sk-own"),
    ]
    assert heard[0][2]["temperature"] == 0.5
    assert seen[0].model == "theirs"
    (rollout,) = await store.query_rollouts()
    spans = [s for s in await store.query_spans(rollout.rollout_id) if "agentlightning.request" in s.attributes]
    assert [span.name for span in spans] == ["chat theirs", "embeddings theirs"]
    assert "Forty-two." in str(spans[0].attributes["agentlightning.response"])
    assert json.loads(str(spans[1].attributes["agentlightning.request"]))["input"] == "What is 6 * 7?"


@pytest.mark.parametrize("model", ["llm", "main_llm", "judge"])
async def test_a_model_may_have_the_name_of_a_resource(
    tmp_path: Path, provider: tuple[str, list[Any]], model: str
) -> None:
    url, heard = provider

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> float:
        async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
            await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task}])
        return 1.0

    given = {"llm": agl.LLM(endpoint=url, model=model)}
    trainer = agl.Trainer(
        store=InMemoryLightningStore(), initial_resources=given, run_dir=tmp_path / "run", console=SilentConsole()
    )
    await trainer.fit_async(agent, ["a"])
    assert [body["model"] for _, _, body in heard] == [model]


async def test_the_providers_key_stays_here(tmp_path: Path, provider: tuple[str, list[Any]]) -> None:
    url, heard = provider

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> float:
        assert "sk-secret" not in (llm.api_key or "") + llm.endpoint
        async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
            await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task}])
        return 1.0

    store = InMemoryLightningStore()
    given = {"llm": agl.LLM(endpoint=url, model="theirs", api_key="sk-secret")}
    trainer = agl.Trainer(store=store, initial_resources=given, run_dir=tmp_path / "run", console=SilentConsole())
    await trainer.fit_async(agent, ["a", "b"])
    assert {key for _, key, _ in heard} == {"Bearer sk-secret"}
    assert "sk-secret" not in str([r.model_dump() for r in await store.query_resources()])
