"""What other providers' calls cost, and limits to it: recorded per call, counted per rollout and for all together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from hypothesis import given, strategies as st

from agentlightning.cli.options import UpstreamOptions
from agentlightning.cli.upstream import read_upstreams
from agentlightning.errors import ConfigError
from agentlightning.gateway import Gateway, Provider, SpendingLimits, TokenPrice
from agentlightning.gateway.routing.spending import Reservations, Usage
from agentlightning.types import RolloutMode
from agentlightning.types.call import Spent, spent_of
from agentlightning.types.names import COST
from tests.gateway.conftest import Site
from tests.gateway.scripted import ScriptedEngine

ASK: Any = [{"role": "user", "content": "What is 2 + 3?"}]
PRICE = TokenPrice(input=2.0, output=10.0)


@pytest.fixture
async def far(site: Site) -> AsyncIterator[dict[str, Any]]:
    """Where the other provider is: a gateway of its own."""
    engine = ScriptedEngine(site.engine.rendering, lambda prompt, params: "From afar.")
    async with Gateway(site.store, engine, site.engine.rendering, policy="far-model") as gateway:
        claimed = await site.store.start_rollout(input={}, mode=RolloutMode.VAL)
        key = gateway.key_for(claimed.rollout_id, claimed.attempt.attempt_id)
        yield {"base_url": gateway.endpoint, "api_key": key, "model": "far-model"}


async def serve(site: Site, far: dict[str, Any], **settings: Any) -> None:
    await site.gateway.update_model_list({"judge": Provider(**far, **settings)})


async def test_the_cost_of_each_call_is_recorded_streams_included(site: Site, far: dict[str, Any]) -> None:
    await serve(site, far, price=PRICE)
    async with site.client() as client:
        reply = await client.chat.completions.create(model="judge", messages=ASK)
        streamed = [p async for p in await client.chat.completions.create(model="judge", messages=ASK, stream=True)]
        text = await client.completions.create(model="judge", prompt="What", stream=True)
        [part async for part in text]
        said = await client.responses.create(model="judge", input="Hello?")
    await site.close()
    assert reply.usage is not None
    cost = (reply.usage.prompt_tokens * 2 + reply.usage.completion_tokens * 10) / 1e6
    assert streamed[-1].usage == reply.usage, "the provider was asked to tell"
    chat, stream, _, responses = await site.spans()
    assert chat.attributes[COST] == stream.attributes[COST] == pytest.approx(cost)
    assert said.usage is not None
    assert responses.attributes["gen_ai.usage.output_tokens"] == said.usage.output_tokens
    found = spent_of(await site.spans())
    assert found == {"judge": site.gateway.spent["judge"]}
    assert found["judge"].calls == 4
    assert found["judge"].cost == pytest.approx(sum(span.attributes[COST] for span in await site.spans()))
    assert f"cost {found['judge'].cost:.4f}" in found["judge"].words()


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"calls": 1}, "calls=1"),
        ({"tokens": 5}, "tokens=5"),
        ({"cost": 1e-6}, "cost=1e-06"),
        ({"run_calls": 1}, "run_calls=1"),
        ({"run_tokens": 5}, "run_tokens=5"),
        ({"run_cost": 1e-6}, "run_cost=1e-06"),
    ],
)
async def test_a_limit_is_named_by_the_refusal(
    site: Site, far: dict[str, Any], limits: dict[str, float], name: str
) -> None:
    await serve(site, far, price=PRICE, limits=SpendingLimits(**limits))  # pyright: ignore[reportArgumentType]
    other = await site.another()
    async with site.client() as client, other.client() as another:
        await client.chat.completions.create(model="judge", messages=ASK)
        for goes_on in (True, False):
            with pytest.raises(openai.BadRequestError, match=name) as refused:
                await client.chat.completions.create(model="judge", messages=ASK)
            assert refused.value.code == "provider_limit_exceeded"
            if goes_on:
                await client.chat.completions.create(model="policy", messages=ASK)
        if name.startswith("run_"):
            with pytest.raises(openai.BadRequestError, match=name):
                await another.chat.completions.create(model="judge", messages=ASK)
        else:
            await another.chat.completions.create(model="judge", messages=ASK)
    summary = await site.gateway.close_attempt(site.rollout_id, site.attempt_id)
    assert name in ((summary.refused_by_provider if name.startswith("run_") else summary.limit) or "")
    ended = [span.attributes.get("error.type") for span in await site.spans()]
    assert sorted(ended, key=str) == [None, None, "refused", "refused"], "in whatever order they were written"


@pytest.mark.parametrize("told", [{}, {"max_tokens": 500}], ids=["length unknown", "length told"])
@pytest.mark.parametrize("limit", ["tokens", "cost", "run_tokens", "run_cost"])
async def test_calls_at_the_same_time_do_not_go_beyond_a_limit_together(
    site: Site, far: dict[str, Any], limit: str, told: dict[str, Any]
) -> None:
    await serve(site, far, price=PRICE)
    async with site.client() as client:
        await client.chat.completions.create(model="judge", messages=ASK)
        one = site.gateway.spent["judge"]
        most = 4 * (one.cost if limit.endswith("cost") else one.tokens)
        await serve(site, far, price=PRICE, limits=SpendingLimits(**{limit: most}))  # pyright: ignore[reportArgumentType]
        asked = [client.chat.completions.create(model="judge", messages=ASK, **told) for _ in range(8)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
    refused = [a for a in answers if isinstance(a, openai.BadRequestError)]
    assert len(refused) == 5, "the first call and three of these are within the limit"
    assert all(f" {limit}=" in str(error) for error in refused)
    assert site.gateway.spent["judge"].tokens == 4 * one.tokens
    await site.close()
    assert len([s for s in await site.spans() if s.attributes.get("error.type") == "refused"]) == 5


async def test_calls_that_fit_together_do_not_wait_for_each_other(site: Site, far: dict[str, Any]) -> None:
    """Of the four, each of which may use 130 tokens or so, all are at the provider at once."""
    at_once = 0
    engine: ScriptedEngine = site.engine

    async def wait_for_all() -> None:
        nonlocal at_once
        while len(engine.params) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        at_once = len(engine.params)
        engine.open.set()

    engine.open.clear()
    async with Gateway(site.store, engine, engine.rendering, policy="far-model") as gateway:
        claimed = await site.store.start_rollout(input={}, mode=RolloutMode.VAL)
        key = gateway.key_for(claimed.rollout_id, claimed.attempt.attempt_id)
        at = {"base_url": gateway.endpoint, "api_key": key, "model": "far-model"}
        await serve(site, at, limits=SpendingLimits(run_tokens=1000))
        async with site.client() as client:
            asked = [client.chat.completions.create(model="judge", messages=ASK, max_tokens=100) for _ in range(4)]
            async with asyncio.timeout(30):
                await asyncio.gather(wait_for_all(), *asked)
    assert at_once == 4


async def test_a_call_that_waits_for_its_turn_ends_with_its_client(site: Site, far: dict[str, Any]) -> None:
    """And leaves nothing behind: others still get what is left."""
    await serve(site, far, limits=SpendingLimits(run_tokens=2000))
    account = site.gateway.target("judge").account  # pyright: ignore[reportAttributeAccessIssue]
    live = await site.gateway._attempts.get(site.rollout_id, site.attempt_id)  # pyright: ignore[reportPrivateUsage]
    held = await account.admit(live, {"max_tokens": 1500}, 4)
    async with site.client() as client:
        waiting = asyncio.create_task(client.chat.completions.create(model="judge", messages=ASK))
        while not live.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        waiting.cancel()
        while live.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        account.release(live, held)
        reply = await client.chat.completions.create(model="judge", messages=ASK)
    assert reply.choices[0].message.content == "From afar."
    assert site.gateway.spent["judge"].calls == 2


async def test_nobody_waits_for_an_attempt_that_asks_for_very_many_tokens(site: Site, far: dict[str, Any]) -> None:
    await serve(site, far, price=PRICE, limits=SpendingLimits(run_tokens=5000, run_cost=1.0))
    account = site.gateway.target("judge").account  # pyright: ignore[reportAttributeAccessIssue]
    live = await site.gateway._attempts.get(site.rollout_id, site.attempt_id)  # pyright: ignore[reportPrivateUsage]
    held = await account.admit(live, {"max_tokens": 10**9}, 4)
    other = await site.another()
    async with other.client() as client:
        short = await client.chat.completions.create(model="judge", messages=ASK, max_tokens=100)
        assert short.choices[0].message.content == "From afar."
        greedy = asyncio.create_task(client.chat.completions.create(model="judge", messages=ASK, max_tokens=10**9))
        await client.chat.completions.create(model="judge", messages=ASK, max_tokens=100)
        assert not greedy.done(), "one attempt that asks for so much at a time"
        account.release(live, held)
        await greedy


@given(
    limit=st.integers(1, 100),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60), st.booleans(), st.floats(0, 1)), max_size=30),
)
def test_calls_under_way_stay_within_a_limit_but_for_one_attempt(
    limit: int, steps: list[tuple[int, int, bool, float]]
) -> None:
    """Whenever one begins, whatever began and ended before."""
    reservations, total = Reservations(limit, None), Spent()
    open_calls: dict[tuple[str, str], list[Spent]] = {}
    for number, tokens, ends, part in steps:
        key, call = ("", str(number)), Spent(calls=1, tokens=tokens)
        if ends and open_calls.get(key):
            call = open_calls[key].pop()
            total += Spent(calls=1, tokens=int(part * call.tokens))
            reservations.release(key, call)
        elif total.tokens < limit and reservations.fits(key, call, total):
            reservations.hold(key, call, total)
            open_calls.setdefault(key, []).append(call)
            asked = [sum(call.tokens for call in calls) for calls in open_calls.values()]
            assert total.tokens + sum(asked) - max(asked) <= limit


async def test_another_gateway_goes_on_counting(site: Site, far: dict[str, Any]) -> None:
    provider = Provider(**far, price=PRICE, limits=SpendingLimits(calls=1, run_calls=5))
    await site.gateway.update_model_list({"judge": provider})
    async with site.client() as client:
        await client.chat.completions.create(model="judge", messages=ASK)
    await site.gateway.stop()
    models = {"judge": provider}
    async with Gateway(site.store, None, None, models=models, spent=site.gateway.spent) as gateway:
        again = Site(site.store, site.engine, gateway, site.rollout_id, site.attempt_id)
        async with again.client() as client:
            with pytest.raises(openai.BadRequestError, match=" calls=1"):
                await client.chat.completions.create(model="judge", messages=ASK)
        assert gateway.spent["judge"].calls == 1
    async with Gateway(site.store, None, None, models=models, spent={"judge": Spent(calls=5)}) as gateway:
        fresh = await Site(site.store, site.engine, gateway, "", "").another()
        async with fresh.client() as client:
            with pytest.raises(openai.BadRequestError, match="run_calls=5"):
                await client.chat.completions.create(model="judge", messages=ASK)


def test_what_providers_tell_of_their_tokens() -> None:
    openais = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    assert Usage.reported({"usage": openais}) == Usage(input=10, output=3, cached=4)
    anthropics = {"input_tokens": 6, "output_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 1}
    assert Usage.reported({"usage": anthropics}) == Usage(input=11, output=3, cached=4)
    responses = {"input_tokens": 10, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}}
    assert Usage.reported({"usage": responses}) == Usage(input=10, output=3, cached=4)
    for nothing in ({}, {"usage": None}, {"usage": {}}, {"usage": {"prompt_tokens": None}}):
        assert Usage.reported(nothing) is None
    nonsense = Usage.expected({"max_tokens": 10**400, "n": 10**400}, 4, 1)
    assert PRICE.of(nonsense) > 0, "a number, and no OverflowError"
    assert Usage.reported({"usage": {"prompt_tokens": 5, "completion_tokens": -7}}) == Usage(input=5)
    guessed = Usage.guessed("x" * 41, b"y" * 8)
    assert (guessed.input, guessed.output, guessed.estimated) == (11, 2, True)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_cached_tokens_are_priced_apart(cached: int, fresh: int, output: int) -> None:
    usage = Usage(input=cached + fresh, output=output, cached=cached)
    price = TokenPrice(input=3.0, output=15.0, cached_input=0.5)
    assert price.of(usage) * 1e6 == pytest.approx(cached * 0.5 + fresh * 3 + output * 15)
    assert TokenPrice(input=3.0).of(usage) * 1e6 == pytest.approx(3 * (cached + fresh))


def test_what_cannot_be_held_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a price"):
        Provider(base_url="http://x", limits=SpendingLimits(cost=1.0))
    with pytest.raises(ConfigError, match="calls of a provider must be above 0"):
        SpendingLimits(calls=0)
    with pytest.raises(ConfigError, match="must not be below 0"):
        TokenPrice(input=-1.0)


def test_the_command_line_says_prices_and_limits() -> None:
    given = ["judge=https://a.example/v1", "user=https://b.example/v1"]
    limits = ["judge.run_cost=5", "judge.calls=3", "user.tokens=1000"]
    found = read_upstreams(
        UpstreamOptions(upstream=given, upstream_price=["judge=0.15,0.6,0.05"], upstream_limit=limits)
    )
    assert found["judge"].price == TokenPrice(input=0.15, output=0.6, cached_input=0.05)
    assert found["judge"].limits == SpendingLimits(run_cost=5, calls=3)
    assert found["user"].limits == SpendingLimits(tokens=1000)
    for prices, limits, words in (
        (["judge=cheap"], [], "An example"),
        (["other=1,2"], [], "no --upstream other=URL"),
        ([], ["judge.hours=3"], "the limits are calls"),
        ([], ["calls=3"], "about ''"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_upstreams(UpstreamOptions(upstream=given, upstream_price=prices, upstream_limit=limits))


async def test_a_call_whose_client_hangs_up_before_an_answer_is_counted_by_estimate(
    site: Site, far: dict[str, Any]
) -> None:
    """A provider may charge it, and who hangs up each time would never come to a limit."""
    seen = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        seen.set()
        await reader.read(-1)  # and never an answer
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await serve(site, {**far, "base_url": f"http://127.0.0.1:{port}/v1"}, limits=SpendingLimits(tokens=4000))
        async with site.client() as client:
            call = asyncio.create_task(client.chat.completions.create(model="judge", messages=ASK, max_tokens=1))
            await seen.wait()
            call.cancel()
            async with asyncio.timeout(5):
                while site.gateway.spent["judge"].tokens < 10:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
