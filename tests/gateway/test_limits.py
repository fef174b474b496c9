"""What is trained, how much an attempt may ask, and which settings win: the gateway's rules."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import openai
import pytest

import agentlightning as agl
from agentlightning.algorithm.episode import collect
from agentlightning.errors import ConfigError
from agentlightning.gateway import Gateway, Provider
from agentlightning.gateway.routing.upstream import Upstream
from agentlightning.rendering import RenderersRendering
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import AttemptedRollout, Outcome, RolloutMode
from tests.gateway.conftest import Site, calculator
from tests.gateway.scripted import ScriptedEngine

ASK: Any = [{"role": "user", "content": "What is 2 + 3?"}]
Use = Callable[[Site], Awaitable[None]]


async def served(
    store: InMemoryLightningStore, rendering: RenderersRendering, use: Use, mode: RolloutMode, **settings: Any
) -> tuple[Site, bool]:
    """Use a gateway with these settings; returns the closed attempt and whether it was truncated."""
    engine = ScriptedEngine(rendering, calculator)
    claimed = await store.start_rollout(input={}, mode=mode)
    async with Gateway(store, engine, rendering, **settings) as gateway:
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        await use(site)
        summary = await gateway.close_attempt(site.rollout_id, site.attempt_id)
    return site, summary.limit is not None


async def test_only_calls_with_a_certain_system_prompt_are_trained(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    async def use(site: Site) -> None:
        async with site.client() as client:
            for system in ("You are the WRITER.", "You are the reader.", None):
                messages = [{"role": "system", "content": system}, *ASK] if system else ASK
                await client.chat.completions.create(model="policy", messages=messages)

    site, _ = await served(store, rendering, use, RolloutMode.TRAIN, train_prompts="(?i)writer")
    calls = (await store.query_calls([site.rollout_id]))[site.rollout_id]
    assert [call.info.trained for call in calls] == [True, False, False]


@pytest.mark.slow
async def test_parallel_calls_do_not_sample_beyond_the_limit(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    most = 60

    async def use(site: Site) -> None:
        site.engine.script = lambda *_: "one two three four five six seven eight nine ten"
        site.engine.delay = 0.05

        async def ask(n: int, **fields: Any) -> int:
            async with site.client() as client:
                try:
                    got = await client.chat.completions.create(model="policy", messages=ASK, n=n, **fields)
                except openai.BadRequestError as error:
                    return 0 if error.code == "max_tokens_exceeded" else 1000
            return got.usage.completion_tokens

        asked: Any = [(n, limit) for n in (1, 2, 1) for limit in ({}, {"max_tokens": 9}) for _ in range(4)]
        used = await asyncio.gather(*(ask(n, **limit) for n, limit in asked))
        assert 0 in used, "some had to be refused"
        assert most - 2 <= sum(used) <= most, used

    site, truncated = await served(store, rendering, use, RolloutMode.TRAIN, max_tokens=most)
    assert truncated
    calls = (await store.query_calls([site.rollout_id]))[site.rollout_id]
    assert sum(len(call.response_ids) for call in calls) <= most


async def test_calls_beyond_the_limit_are_refused_and_the_attempt_is_truncated(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    async def use(site: Site) -> None:
        async with site.client() as client:
            for _ in range(2):
                await client.chat.completions.create(model="policy", messages=ASK)
            with pytest.raises(openai.BadRequestError, match="may make 2 model calls") as refused:
                await client.chat.completions.create(model="policy", messages=ASK)
            assert refused.value.code == "max_calls_exceeded"

    site, truncated = await served(store, rendering, use, RolloutMode.TRAIN, max_calls=2)
    assert truncated
    assert len((await store.query_calls([site.rollout_id]))[site.rollout_id]) == 2


@pytest.mark.parametrize(
    ("limits", "calls", "why"),
    [
        ({"max_calls": 2}, 2, "may make 2 model calls"),
        ({"max_tokens": 10}, 1, "10 tokens sampled, and has had 10"),
        ({}, 1, "did not fit the context"),
    ],
    ids=["calls", "tokens", "context"],
)
async def test_an_agent_that_raises_at_a_limit_is_truncated(
    store: InMemoryLightningStore, rendering: RenderersRendering, limits: dict[str, Any], calls: int, why: str
) -> None:
    """An ordinary client raises what it is refused with, and an ordinary agent does not catch it."""

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> float:
        async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as client:
            for n in range(3):
                messages: Any = ASK if limits or n == 0 else [{"role": "user", "content": "1 + " * 8000}]
                await client.chat.completions.create(model=llm.model, messages=messages)
        return 1.0

    async with Gateway(store, ScriptedEngine(rendering, calculator), rendering, **limits) as gateway:
        runner = LitAgentRunner(agl.DummyTracer(), gateway=gateway)
        runner.init(agent)
        runner.init_worker(0, store)
        with pytest.raises(openai.BadRequestError):
            await runner.step("task", resources={"llm": gateway.as_resource()}, mode=RolloutMode.TRAIN)
        runner.teardown()
    (rollout,) = await store.query_rollouts()
    done = await store.get_rollout_by_id(rollout.rollout_id)
    assert isinstance(done, AttemptedRollout)
    assert done.attempt.outcome is Outcome.TRUNCATED
    assert why in (done.attempt.error or "")
    (episode,) = await collect(store, [done.rollout_id])
    assert (len(episode.calls), episode.reward, len(episode.refused)) == (calls, 0.0, 1)


LONG: Any = [{"role": "user", "content": "1 + " * 8000}]


@pytest.mark.quick_with("own max_tokens-", "context-stops", "calls-", "tokens-")
@pytest.mark.parametrize("ending", ["stops", "goes on", "a judge is asked"])
@pytest.mark.parametrize(
    ("hit", "limits", "goes_on"),
    [
        ({"messages": ASK, "max_tokens": 3}, {}, True),
        ({"messages": ASK, "max_tokens": 3, "n": 2}, {}, True),
        ({"messages": LONG}, {}, True),
        ({"messages": None}, {}, True),
        ({"messages": ASK}, {"max_calls": 1}, False),
        ({"messages": ASK}, {"max_tokens": 10}, False),
    ],
    ids=["own max_tokens", "own max_tokens, twice", "context", "cut off by the context", "calls", "tokens"],
)
async def test_only_a_limit_of_the_run_that_ended_the_attempt_truncates_it(
    store: InMemoryLightningStore,
    rendering: RenderersRendering,
    hit: dict[str, Any],
    limits: dict[str, Any],
    goes_on: bool,
    ending: str,
) -> None:
    """An agent that compacts its history after a refusal went on; an answer's own limit marks the call alone."""
    own = "max_tokens" in hit
    if hit["messages"] is None:  # it fits the context, and its answer does not
        empty = len(rendering.render([{"role": "user", "content": ""}], None))
        hit = {"messages": [{"role": "user", "content": "a" + " a" * (4096 - 6 - empty)}]}

    async def use(site: Site) -> None:
        site.engine.script = lambda *_: "one two three four five six seven eight nine ten eleven twelve"
        headers = {"a judge is asked": {"X-AGL-Role": "judge"}}.get(ending, {})
        async with site.client() as client:
            asked: list[dict[str, Any]] = [hit, {"messages": ASK}] if limits else [hit]
            asked += [] if ending == "stops" else [{"messages": ASK, "extra_headers": headers}]
            for fields in asked:
                with suppress(openai.BadRequestError):
                    await client.chat.completions.create(model="policy", **fields)

    site, truncated = await served(store, rendering, use, RolloutMode.TRAIN, **limits)
    assert truncated is (not own and not (goes_on and ending == "goes on"))
    calls = (await store.query_calls([site.rollout_id]))[site.rollout_id]
    assert ("length" in {c.info.finish_reason for c in calls}) is (
        hit["messages"] is not LONG and "max_calls" not in limits
    )


async def test_tokens_beyond_the_limit_are_not_sampled(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    async def use(site: Site) -> None:
        async with site.client() as client:
            first = await client.chat.completions.create(model="policy", messages=ASK)
            assert first.usage is not None
            assert first.usage.completion_tokens == 10
            assert first.choices[0].finish_reason == "length"
            with pytest.raises(openai.BadRequestError, match="10 tokens sampled, and has had 10"):
                await client.chat.completions.create(model="policy", messages=ASK)

    _, truncated = await served(store, rendering, use, RolloutMode.TRAIN, max_tokens=10)
    assert truncated


@pytest.mark.parametrize(("mode", "temperature"), [(RolloutMode.TRAIN, 1.0), (RolloutMode.VAL, 0.5)])
async def test_each_mode_has_its_own_settings(
    store: InMemoryLightningStore, rendering: RenderersRendering, mode: RolloutMode, temperature: float
) -> None:
    async def use(site: Site) -> None:
        async with site.client() as client:
            await client.chat.completions.create(model="policy", messages=ASK, temperature=0.0, top_p=0.9)

    settings: Any = {"train_sampling": {"temperature": 1.0}, "val_sampling": {"temperature": 0.5}}
    site, _ = await served(store, rendering, use, mode, **settings)
    (call,) = (await store.query_calls([site.rollout_id]))[site.rollout_id]
    assert call.info.asked == {"temperature": 0.0, "top_p": 0.9}
    assert (call.info.used["temperature"], call.info.used["top_p"]) == (temperature, 0.9)


def test_rules_that_mean_nothing_are_errors(store: InMemoryLightningStore, rendering: RenderersRendering) -> None:
    engine = ScriptedEngine(rendering, calculator)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"train_agents": "("}, "train_agents is not a regular expression"),
        ({"max_calls": 0}, "max_calls must be at least 1"),
        ({"val_sampling": {"heat": 1}}, "val_sampling"),
    ]
    for settings, message in wrong:
        with pytest.raises(ConfigError, match=message):
            Gateway(store, engine, rendering, **settings)


def test_a_rollout_sticks_to_a_replica_and_a_lost_one_moves_only_its_own() -> None:
    urls = tuple(f"http://replica-{n}/v1" for n in range(4))
    four, three = (Upstream("m", Provider(base_url=some), None, None) for some in (urls, urls[:3]))  # pyright: ignore[reportArgumentType]
    chosen = {f"ro-{n}": four._replica(f"ro-{n}") for n in range(400)}
    shares = [list(chosen.values()).count(url) for url in urls]
    assert min(shares) > 60
    assert all(three._replica(r) == url for r, url in chosen.items() if url != urls[3])
