"""Other models behind the gateway: names, frozen engines, other providers (a second gateway plays one)."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import openai
import pytest

from agentlightning.errors import ConfigError, EngineError
from agentlightning.gateway import Frozen, Gateway, Provider
from agentlightning.gateway.dialects.base import Body
from agentlightning.gateway.dialects.chat import ChatDialect
from agentlightning.gateway.routing.models import Trained
from agentlightning.rendering import RenderersRendering
from agentlightning.rendering.messages import Message
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import RolloutMode
from tests.gateway.conftest import CALC, Site, calculator
from tests.gateway.scripted import ScriptedEngine

ASK: Any = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture
async def provider(site: Site) -> AsyncIterator[Site]:
    """The other provider: a gateway of its own, whose attempt's key is the provider's API key."""
    engine = ScriptedEngine(site.engine.rendering, lambda prompt, params: "From afar.")
    async with Gateway(site.store, engine, site.engine.rendering, policy="far-model") as gateway:
        claimed = await site.store.start_rollout(input={}, mode=RolloutMode.VAL)
        found = Site(site.store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        far = Provider(base_url=gateway.endpoint, api_key=found.key, model="far-model")
        await site.gateway.update_model_list({"gpt-far": far, "gpt-near": "policy", "twin": "gpt-far"})
        yield found


async def test_a_provider_answers_as_if_asked_directly(site: Site, provider: Site) -> None:
    async with site.client() as client:
        create: Any = client.chat.completions.create
        reply = await create(model="gpt-far", messages=ASK)
        parts = [p async for p in await create(model="twin", messages=ASK, stream=True)]
        message = await client.responses.create(model="gpt-far", input="Hello?")
        assert [m.id for m in (await client.models.list()).data] == [
            "policy",
            "scripted",
            "gpt-far",
            "gpt-near",
            "twin",
        ]
    assert reply.choices[0].message.content == "From afar."
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == "From afar."
    assert len(parts) > 3
    assert message.output_text == "From afar."
    assert await site.close() == [], "what a provider says is never trained"
    spans = await site.spans()
    assert [span.name for span in spans] == ["chat gpt-far"] * 3
    assert spans[0].attributes["gen_ai.response.id"] == reply.id
    assert json.loads(spans[0].attributes["agentlightning.request"])["messages"] == ASK
    assert "From afar." in spans[0].attributes["agentlightning.response"]


class Noting(ChatDialect):
    """Notes in which threads the conversations of a provider's calls are read."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def answer_message(self, answer: Body) -> Message | None:
        self.threads.append(threading.current_thread().name)
        return super().answer_message(answer)


async def test_a_large_request_to_a_provider_is_recorded_whole_beside_the_event_loop(
    site: Site, provider: Site
) -> None:
    models = {"judge": Provider(base_url=provider.base_url, api_key=provider.key, model="far-model")}
    noting = Noting()
    large: Any = [{"role": "user", "content": "word, " * 30_000}]
    async with Gateway(site.store, None, None, models=models, dialects=(noting,)) as gateway:
        here = Site(site.store, site.engine, gateway, site.rollout_id, site.attempt_id)
        async with here.client() as client:
            for messages in (ASK, large):
                with suppress(openai.BadRequestError):  # it is longer than the far model's context
                    await client.chat.completions.create(model="judge", messages=messages)
        await here.close()
        small, whole = await here.spans()
        assert json.loads(str(whole.attributes["agentlightning.request"]))["messages"] == large
        assert "What is" in str(small.attributes["agentlightning.request"])
        assert gateway.spent["judge"].calls == 2
    main = threading.current_thread().name
    assert [name == main for name in noting.threads] == [True, False]


async def test_a_providers_errors_are_its_own(site: Site, provider: Site) -> None:
    async with site.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="gpt-far", messages=ASK, temperature=-1)
        assert refused.value.param == "temperature"
        await provider.gateway.stop()
        with pytest.raises(openai.InternalServerError, match="gpt-far"):
            await client.chat.completions.create(model="gpt-far", messages=ASK)
    await site.close()
    assert {span.status.status_code for span in await site.spans()} == {"ERROR"}


async def test_a_stalled_provider_is_given_up_with_its_client(site: Site, provider: Site) -> None:
    provider.engine.delay = 30.0
    async with site.client(timeout=0.3) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="gpt-far", messages=ASK)
    async with asyncio.timeout(5):
        while provider.engine.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await site.close()
    (span,) = await site.spans()
    assert span.status.description == "the client disconnected"


async def test_another_name_for_the_policy_is_trained(site: Site, provider: Site) -> None:
    async with site.client() as client:
        await client.chat.completions.create(model="gpt-near", messages=ASK)
    (call,) = await site.close()
    assert (call.info.model, call.info.policy, call.info.trained) == ("gpt-near", "policy", True)


async def test_frozen_engines_and_judges_are_recorded_and_not_trained(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    engine = ScriptedEngine(rendering, calculator)
    frozen = Frozen(ScriptedEngine(rendering, lambda prompt, params: "Seven."), rendering)
    claimed = await store.start_rollout(input={}, mode=RolloutMode.TRAIN)
    async with Gateway(
        store, engine, rendering, models={"judge": frozen}, train_sampling={"temperature": 1.0}, train_agents="^solver$"
    ) as gateway:
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        async with site.client() as client:
            create: Any = client.chat.completions.create
            await create(model="judge", messages=ASK, temperature=0.0)
            for headers in ({"x-agl-agent": "solver"}, {"x-agl-agent": "solver", "x-agl-role": "judge"}, {}):
                await create(model="policy", messages=ASK, tools=[CALC], extra_headers=headers)
        calls = await site.close()
    assert [(c.info.policy, c.info.trained) for c in calls] == [
        ("judge", False),
        ("policy", True),
        ("policy", False),
        ("policy", False),
    ]
    assert calls[0].info.temperature == 0.0, "only the policy is sampled as the training asks"
    assert rendering.decode(calls[0].response_ids).startswith("Seven.")


async def test_policies_are_trained_and_keep_histories_of_their_own(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    """Both get the same conversation; each continues the tokens that it sampled itself."""
    solver = ScriptedEngine(rendering, lambda prompt, params: "Five.")
    checker = ScriptedEngine(rendering, lambda prompt, params: "Five.")
    claimed = await store.start_rollout(input={}, mode=RolloutMode.TRAIN)
    others = {"checker": Trained(checker, rendering)}
    sampling = {"temperature": 0.5}
    async with Gateway(
        store, solver, rendering, policy="solver", models=others, train_sampling=sampling, max_calls=4
    ) as gateway:
        assert gateway.as_resource().model == "solver"
        site = Site(store, solver, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        followed = [*ASK, {"role": "assistant", "content": "Five."}, {"role": "user", "content": "Sure?"}]
        async with site.client() as client:
            create: Any = client.chat.completions.create
            for messages in (ASK, followed):
                for name in ("solver", "checker"):
                    await create(model=name, messages=messages)
            with pytest.raises(openai.BadRequestError, match="4"):
                await create(model="checker", messages=ASK)
        calls = await site.close()
    assert [(c.info.policy, c.info.trained, c.info.temperature) for c in calls] == [
        (name, True, 0.5) for name in ("solver", "checker") * 2
    ]
    first = {c.info.policy: c for c in calls[:2]}
    for call in calls[2:]:
        parent = first[call.info.policy]
        assert call.info.parent_call_id == parent.info.call_id
        known = [*parent.prompt_ids.tolist(), *parent.response_ids.tolist()]
        assert call.prompt_ids.tolist()[: len(known)] == known
    assert (len(solver.sampled), len(checker.sampled)) == (2, 2)


async def test_names_that_mean_nothing_are_errors(site: Site) -> None:
    for models in ({"policy": "policy"}, {"a": "b"}, {"a": "b", "b": "a"}):
        with pytest.raises(ConfigError):
            await site.gateway.update_model_list(models)
    async with site.client() as client:
        with pytest.raises(openai.NotFoundError, match=r"model=llm\.model .*; there are: policy, scripted"):
            await client.chat.completions.create(model="gpt-far", messages=ASK)


@pytest.mark.parametrize("others", [0, 1])
async def test_any_name_means_the_only_model_where_that_is_wanted(
    store: InMemoryLightningStore, site: Site, others: int
) -> None:
    """With a second model a name that means nothing is refused again. Another name for the same model is no second."""
    rendering = site.engine.rendering
    models = {"twin": "policy"} | ({"judge": Frozen(site.engine, rendering)} if others else {})
    async with Gateway(store, site.engine, rendering, models=models, any_model_name=True) as gateway:
        claimed = await store.start_rollout(input={}, mode=RolloutMode.TRAIN)
        own = Site(store, site.engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        async with own.client() as client:
            if others:
                with pytest.raises(openai.NotFoundError):
                    await client.chat.completions.create(model="claude-haiku", messages=ASK)
            else:
                reply = await client.chat.completions.create(model="claude-haiku", messages=ASK)
                assert reply.model == "claude-haiku"
        assert len(await own.close()) == 1 - others


async def test_a_provider_that_is_away_is_not_the_agents_fault(site: Site, provider: Site) -> None:
    provider.engine.fail = EngineError("out of memory")
    nowhere = Provider(base_url="http://127.0.0.1:9/v1")
    far = Provider(base_url=provider.gateway.endpoint, api_key=provider.key, model="far-model")
    await site.gateway.update_model_list({"nowhere": nowhere, "far": far})
    for model, words in (("nowhere", "did not answer"), ("far", "answered 503")):
        place = await site.another()
        async with place.client() as client:
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model=model, messages=ASK)
        summary = await place.gateway.close_attempt(place.rollout_id, place.attempt_id)
        assert words in (summary.infra_error or "")


async def test_what_the_engine_refuses_is_told_and_recorded(site: Site) -> None:
    site.engine.fail = ConfigError("The grammar of a request cannot be used.")
    async with site.client() as client:
        with pytest.raises(openai.BadRequestError, match="grammar"):
            await client.chat.completions.create(model="policy", messages=ASK)
    (call,) = await site.close()
    assert call.info.error == "The grammar of a request cannot be used."
