"""`LLMProxy`: a gateway in front of other providers, from LiteLLM's list, with a real provider over HTTP behind it."""

# What is old is there while the program runs, not for the checker.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from agentlightning.llm_proxy import LLMProxy, ModelConfig
from aiohttp import web

import agentlightning as agl
from agentlightning.compat.llm_proxy import provider_of
from agentlightning.compat.notice import text
from agentlightning.metrics import SilentConsole
from agentlightning.store import InMemoryLightningStore


class Provider:
    """A server that says which model and which key it was asked with."""

    def __init__(self) -> None:
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        said = f"{body['model']} {request.headers['authorization']}"
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        ids = {"prompt_token_ids": [1, 2, 3]} if body.get("return_token_ids") else {}
        choice |= {"token_ids": [7, 8]} if ids else {}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response(
            {
                **ids,
                "id": "c-1",
                "object": "chat.completion",
                "created": 1,
                "model": "m",
                "choices": [choice],
                "usage": usage,
            }
        )


@pytest_asyncio.fixture
async def provider() -> AsyncIterator[Provider]:
    made = Provider()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield made
    await runner.cleanup()


def listed(name: str, model: str, url: str) -> ModelConfig:
    return {"model_name": name, "litellm_params": {"model": model, "api_base": url, "api_key": "their-key"}}


async def ask(llm: agl.LLM, key: str = "dummy") -> str:
    body = {"model": llm.model, "messages": [{"role": "user", "content": "?"}]}
    headers = {"authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{llm.endpoint}/chat/completions", json=body, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        return (await response.json())["choices"][0]["message"]["content"]


async def test_an_attempt_is_served_and_recorded(provider: Provider) -> None:
    store = InMemoryLightningStore()
    proxy = LLMProxy(model_list=[listed("judge", "openai/gpt-x", provider.url)], store=store, num_retries=2)
    assert not proxy.is_running()
    async with proxy:
        rollout = await store.start_rollout("task")
        llm = proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id)
        assert await ask(llm) == "gpt-x Bearer their-key"
        proxy.update_model_list([listed("other", "hosted_vllm/Qwen/Q", provider.url)])
        await proxy.restart()
        other = proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id)
        assert await ask(other) == "Qwen/Q Bearer their-key"
        await proxy.close_attempt(rollout.rollout_id, rollout.attempt.attempt_id)
    spans = await store.query_spans(rollout.rollout_id)
    assert len(spans) == 2
    assert not proxy.is_running()


async def test_no_keys_are_needed_on_loopback_as_then(provider: Provider) -> None:
    """Runners by hand know the proxy as a resource only, and scripts ask it without any rollout."""
    store = InMemoryLightningStore()
    async with LLMProxy(model_list=[listed("gpt", "hosted_vllm/gpt-x", provider.url)], store=store) as proxy:
        mine, other = [await store.start_rollout(input=n) for n in range(2)]
        llm = proxy.as_resource().for_attempt(mine.rollout_id, mine.attempt.attempt_id, None)
        assert await ask(llm) == "gpt-x Bearer their-key"
        forged = proxy.bind(proxy.as_resource(), other.rollout_id, other.attempt.attempt_id)
        elsewhere = llm.endpoint.replace("/v1", "/key/" + forged.endpoint.rpartition("/key/")[2])
        with pytest.raises(AssertionError, match="lacks the key"):  # that of another attempt opens nothing
            await ask(llm.model_copy(update={"endpoint": elsewhere}))
        assert await ask(proxy.as_resource()) == "gpt-x Bearer their-key"
        assert len(await store.query_rollouts()) == 3, "a request of nobody is an attempt of its own"
        await store.update_attempt(mine.rollout_id, "latest", status=agl.AttemptStatus.SUCCEEDED)
        await proxy.close_attempt(mine.rollout_id, mine.attempt.attempt_id)
        with pytest.raises(AssertionError, match="takes no more model calls"):
            await ask(llm)
        answered, *_ = await store.query_spans(mine.rollout_id)  # all are written when it is closed
        (triplet,) = agl.LlmProxyTraceToTriplet().adapt([answered])
        assert (triplet.prompt["token_ids"], triplet.response["token_ids"]) == ([1, 2, 3], [7, 8])
        assert triplet.metadata["agent_name"] is None
        assert not await store.query_spans(other.rollout_id)
    await store.close()


def test_a_trainer_starts_the_proxy_for_an_algorithm_of_ones_own(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Provider, algorithm and agent in one event loop, as in a script."""
    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> float:
        seen.append(await ask(llm))
        return 1.0

    @agl.algo
    async def mine(*, store: Any, llm_proxy: Any) -> None:
        await store.add_resources({"main_llm": llm_proxy.as_resource()})
        rollouts = [await store.enqueue_rollout(str(n)) for n in range(3)]
        done = await store.wait_for_rollouts(rollout_ids=[r.rollout_id for r in rollouts], timeout=60)
        seen.append([str(r.status) for r in done])

    async def whole() -> None:
        made = Provider()
        app = web.Application()
        app.router.add_post("/v1/chat/completions", made.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        proxy = agl.LLMProxy(model_list=[listed("m", "openai/gpt-x", url)])
        trainer = agl.Trainer(algorithm=mine, llm_proxy=proxy, console=SilentConsole())
        await trainer.fit_async(agent)
        assert not proxy.is_running()
        await runner.cleanup()

    asyncio.run(whole())
    assert seen == ["gpt-x Bearer their-key"] * 3 + [["succeeded"] * 3]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"model": "azure/gpt", "api_key": "k"}, "whose address is not known"),
        ({"model": "openai/gpt", "temperature": 0.5}, "Let the agent send it"),
        ({"model": "openai/gpt", "api_key": "os.environ/NOT_SET_HERE"}, "NOT_SET_HERE"),
    ],
)
def test_an_entry_that_cannot_be_followed_is_refused(entry: dict[str, Any], words: str) -> None:
    with pytest.raises(agl.ConfigError, match=words):
        provider_of({"model_name": "m", "litellm_params": entry})


def test_addresses_and_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://here/v1")
    monkeypatch.setenv("MY_KEY", "k")
    entry = {"model": "gpt", "api_key": "os.environ/MY_KEY", "timeout": 5}
    found = provider_of({"model_name": "m", "litellm_params": entry})
    assert (found.base_url, found.api_key, found.model, found.timeout_seconds) == ("http://here/v1", "k", "gpt", 5.0)


async def test_words_about_litellm_are_taken_and_said(provider: Provider) -> None:
    """And a list of models inside LiteLLM's own settings counts."""
    store = InMemoryLightningStore()
    proxy = LLMProxy(
        store=store,
        litellm_config={"model_list": [listed("m", "openai/gpt-x", provider.url)], "litellm_settings": {}},
        middlewares=["rollout_attempt", "stream_conversion"],
        callbacks=["return_token_ids", "opentelemetry"],
        launch_mode="mp",
        launcher_args=None,
        num_retries=2,
        num_workers=4,
    )
    async with proxy:
        rollout = await store.start_rollout("task")
        llm = proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id)
        assert await ask(llm) == "gpt-x Bearer their-key"
        await proxy.close_attempt(rollout.rollout_id, rollout.attempt.attempt_id)
    assert len(await store.query_spans(rollout.rollout_id)) == 1
    await store.close()
    for word in ("litellm_config", "middlewares", "callbacks", "launch_mode", "launcher_args", "num_retries"):
        assert f"LLMProxy({word}=)  →  " in text(), "in the notice at the script's end"


@pytest.mark.parametrize("word", ["middlewares", "callbacks"])
def test_code_that_would_never_run_is_refused(word: str) -> None:
    class Mine:
        pass

    with pytest.raises(agl.ConfigError, match=rf"LLMProxy\({word}=\) has .*Mine.* is in the store"):
        LLMProxy(**{word: [Mine]})


async def test_what_it_lacks_is_said() -> None:
    with pytest.raises(agl.ConfigError, match="no store"):
        await LLMProxy(model_list=[]).start()
    with pytest.raises(ValueError, match="Say which model"):
        LLMProxy().as_resource()
    with pytest.raises(TypeError, match="surprise"):
        LLMProxy(surprise=1)


class Slow(InMemoryLightningStore):
    """Takes its time to write spans."""

    async def add_many_spans(self, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0.2)
        return await super().add_many_spans(*args, **kwargs)


async def test_a_call_is_in_the_store_when_its_answer_is_there(provider: Provider) -> None:
    store = Slow()
    started = await store.start_rollout("task")
    ids = started.rollout_id, started.attempt.attempt_id
    async with LLMProxy(model_list=[listed("m", "openai/m", provider.url)], store=store) as proxy:
        for number in (1, 2):
            assert await ask(proxy.as_resource(*ids))
            assert len(await store.query_spans(*ids)) == number
    await store.close()
