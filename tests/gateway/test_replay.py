"""Forks: an attempt whose rollout has a recording is answered from it token for token, and sampled from there on."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

from agentlightning.gateway import Frozen, Gateway
from agentlightning.gateway.replay import EDITED, REPLAYED, AttemptReplay
from agentlightning.gateway.sampling import sampler
from agentlightning.store import InMemoryLightningStore, SqliteLightningStore
from agentlightning.types import Call, RecordedAttempt, RolloutMode, recording_of
from agentlightning.types.recording import RecordedCall, tool_call_ids_of
from tests.gateway.conftest import CALC, Site, calculator
from tests.gateway.scripted import ScriptedEngine
from tests.gateway.test_gemini import client_of

Talk = Callable[[Site, str], Awaitable[list[Any]]]
"""A conversation of three calls with a tool in it, which begins with this question; what the agent was told."""


def tool_result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "5"}


async def by_chat(site: Site, question: str, **more: Any) -> list[Any]:
    told: list[Any] = []
    async with site.client() as client:
        messages: list[Any] = [{"role": "user", "content": question}]
        for _ in range(3):
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=[CALC], **more)
            message = answer.choices[0].message
            told.append(message.model_dump(exclude_none=True))
            messages.append(told[-1])
            results = [tool_result(call.id) for call in message.tool_calls or ()]
            messages += results or [{"role": "user", "content": "What is 4 + 4?"}]
    return told


async def streamed(site: Site, question: str) -> list[Any]:
    told: list[Any] = []
    async with site.client() as client:
        messages: list[Any] = [{"role": "user", "content": question}]
        for _ in range(3):
            given: Any = {"model": "policy", "messages": messages, "tools": [CALC]}
            async with client.chat.completions.stream(**given) as stream:
                message = (await stream.get_final_completion()).choices[0].message
            told.append(json.loads(message.model_dump_json(include={"content", "tool_calls"})))
            calls = [
                {
                    "id": c.id,
                    "type": "function",
                    "function": {"name": c.function.name, "arguments": c.function.arguments},
                }
                for c in message.tool_calls or ()
            ]
            messages.append(
                {"role": "assistant", "content": message.content, **({"tool_calls": calls} if calls else {})}
            )
            messages += [tool_result(c["id"]) for c in calls] or [{"role": "user", "content": "What is 4 + 4?"}]
    return told


async def by_responses(site: Site, question: str) -> list[Any]:
    told: list[Any] = []
    tool: Any = {"type": "function", "strict": False, **CALC["function"]}
    async with site.client() as client:
        items: list[Any] = [{"role": "user", "content": question}]
        for _ in range(3):
            answer = await client.responses.create(model="policy", input=items, tools=[tool])
            output = [item.model_dump(exclude_none=True) for item in answer.output]
            told.append([{k: v for k, v in item.items() if k != "id"} for item in output])
            items += output
            calls = [item for item in answer.output if item.type == "function_call"]
            results = [{"type": "function_call_output", "call_id": c.call_id, "output": "5"} for c in calls]
            items += results or [{"role": "user", "content": "What is 4 + 4?"}]
    return told


async def by_messages(site: Site, question: str) -> list[Any]:
    told: list[Any] = []
    function = CALC["function"]
    tool: Any = {"name": function["name"], "input_schema": function["parameters"]}
    base = site.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base, api_key=site.key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": question}]
        for _ in range(3):
            answer = await client.messages.create(model="policy", max_tokens=100, messages=messages, tools=[tool])
            told.append([block.model_dump(exclude_none=True) for block in answer.content])
            messages.append({"role": "assistant", "content": told[-1]})
            used = [b for b in answer.content if b.type == "tool_use"]
            results: Any = [{"type": "tool_result", "tool_use_id": b.id, "content": "5"} for b in used]
            messages.append({"role": "user", "content": results or "What is 4 + 4?"})
    return told


async def by_gemini(site: Site, question: str, form: str = "whole") -> list[Any]:
    told: list[Any] = []
    async with client_of(site) as client:
        contents: list[Any] = [{"role": "user", "parts": [{"text": question}]}]
        for _ in range(3):
            content = (await client.ask(form, contents))["candidates"][0]["content"]
            calls = [part["functionCall"] for part in content["parts"] if "functionCall" in part]
            told.append(["".join(part.get("text", "") for part in content["parts"]), calls])
            results = [
                {"functionResponse": {"id": c["id"], "name": c["name"], "response": {"result": "5"}}} for c in calls
            ]
            contents += [content, {"role": "user", "parts": results or [{"text": "What is 4 + 4?"}]}]
    return told


TALKS: dict[str, Talk] = {
    "chat": by_chat,
    "streamed": streamed,
    "responses": by_responses,
    "messages": by_messages,
    "gemini": by_gemini,
    "gemini-sse": partial(by_gemini, form="sse"),
    "gemini-array": partial(by_gemini, form="array"),
}


async def recorded(site: Site, calls: list[Call], at: int, **given: Any) -> RecordedAttempt:
    return recording_of(site.rollout_id, calls[:at], tool_call_ids_of(await site.spans()), **given)


def by_id(site: Site, calls: list[Call], at: int, **given: Any) -> RecordedAttempt:
    """The same for forks whose store has the calls."""
    return RecordedAttempt(rollout_id=site.rollout_id, call_ids=[call.info.call_id for call in calls[:at]], **given)


async def fork(site: Site, recording: RecordedAttempt) -> Site:
    """An attempt whose rollout has the recording."""
    update = await site.store.add_resources({"recording": recording})
    claimed = await site.store.start_rollout(input={}, resources_id=update.resources_id, mode=RolloutMode.TRAIN)
    return Site(site.store, site.engine, site.gateway, claimed.rollout_id, claimed.attempt.attempt_id)


def same(a: Call, b: Call) -> bool:
    """Whether two calls have the same tokens, log-probs and versions."""
    arrays = ("prompt_ids", "response_ids", "logprobs", "plain_logprobs")
    return a.versions == b.versions and all(getattr(a, n).tolist() == getattr(b, n).tolist() for n in arrays)


@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("dialect", TALKS)
async def test_the_record_is_given_token_for_token_and_the_rest_is_sampled(
    site: Site, dialect: str, with_tokens: bool
) -> None:
    talk = TALKS[dialect]
    told = await talk(site, "What is 2 + 3?")
    calls = await site.close()
    site.engine.version = 7  # what is sampled from here on is new
    forked = await fork(site, await recorded(site, calls, 2) if with_tokens else by_id(site, calls, 2))
    before = len(site.engine.params)
    again = await talk(forked, "What is 2 + 3?")
    assert len(site.engine.params) == before + 1, "the engine was asked for the last call alone"
    assert again[:2] == told[:2]
    found = await forked.close()
    assert [same(a, b) for a, b in zip(found, calls, strict=True)] == [True, True, False]
    assert [call.info.trained for call in found] == [False, False, True]
    assert [call.info.used.get(REPLAYED) for call in found] == [*(c.info.call_id for c in calls[:2]), None]
    assert [call.versions[0].version for call in found] == [0, 0, 7]
    assert not [call.info.divergence for call in found if call.info.divergence]


async def test_a_recording_by_ids_holds_no_tokens_and_needs_its_calls(site: Site) -> None:
    await by_chat(site, "What is 2 + 3?" * 50)
    recording = by_id(site, await site.close(), 2)
    assert len(recording.model_dump_json()) < 500
    lost = await fork(site, recording.model_copy(update={"call_ids": [*recording.call_ids, "another"]}))
    with pytest.raises(openai.APIStatusError, match="call another is not in the store any more"):
        await by_chat(lost, "What is 2 + 3?" * 50)


async def test_another_question_leaves_the_record_at_the_first_token_that_differs(site: Site) -> None:
    await by_chat(site, "What is 2 + 3?")
    calls = await site.close()
    forked = await fork(site, await recorded(site, calls, 3))
    await by_chat(forked, "What is 2 + 9?")
    found = await forked.close()
    first = found[0].info.divergence
    assert first is not None
    at = first.position
    assert found[0].prompt_ids[:at].tolist() == calls[0].prompt_ids[:at].tolist()
    assert found[0].prompt_ids[at] != calls[0].prompt_ids[at]
    assert f"token {at}" in first.cause
    assert [call.info.trained for call in found] == [True, True, True]


async def test_another_result_of_a_tool_leaves_it_there(site: Site) -> None:
    async def talk(which: Site, result: str) -> None:
        async with which.client() as client:
            messages: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=[CALC])
            message = answer.choices[0].message
            assert message.tool_calls
            messages += [message, {**tool_result(message.tool_calls[0].id), "content": result}]
            await client.chat.completions.create(model="policy", messages=messages, tools=[CALC])

    await talk(site, "5")
    calls = await site.close()
    forked = await fork(site, await recorded(site, calls, 2))
    await talk(forked, "6")
    found = await forked.close()
    assert [REPLAYED in call.info.used for call in found] == [True, False]
    assert (found[1].info.divergence is not None, found[0].info.divergence) == (True, None)


async def test_another_sampling_setting_is_named(site: Site) -> None:
    await by_chat(site, "What is 2 + 3?")
    calls = await site.close()
    forked = await fork(site, await recorded(site, calls, 2))
    await by_chat(forked, "What is 2 + 3?", max_tokens=77)
    found = await forked.close()
    assert found[0].info.divergence is not None
    assert "max_tokens" in found[0].info.divergence.cause


@pytest.mark.parametrize(
    "given",
    [
        {"stop": ["3", "+"]},
        {"stop": "5"},
        {"presence_penalty": 0.5, "logit_bias": {"7": -1.5}},
        {"extra_body": {"stop_token_ids": [7, 8], "min_tokens": 2, "top_k": 5, "min_p": 0.01}},
        {"extra_body": {"ignore_eos": True}, "max_tokens": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_sampling_setting_is_found_the_same_and_answers_alike(
    site: Site, given: dict[str, Any], stream: bool
) -> None:
    """A recording is read from JSON. A response that a stop string ended is cut again where it was."""

    async def answer(of: Site, **more: Any) -> tuple[str, str | None]:
        asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "What is 2 + 3?"}], **given, **more}
        async with of.client() as client:
            if not stream:
                choice = (await client.chat.completions.create(**asked)).choices[0]
                return choice.message.content or "", choice.finish_reason
            chunks = [c async for c in await client.chat.completions.create(**asked, stream=True) if c.choices]
            return "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason

    told = await answer(site)
    recording = await recorded(site, await site.close(), 1, diverged="refuse")
    again = RecordedAttempt.model_validate_json(recording.model_dump_json())
    assert await answer(await fork(site, again)) == told
    with pytest.raises(openai.BadRequestError, match="is another"):
        await answer(await fork(site, again), frequency_penalty=1.5)


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}, {}, None),
        ({}, {"stop": [], "logit_bias": {}, "presence_penalty": 0, "ignore_eos": False}, None),
        ({"stop": ["a"], "seed": 1}, {"stop": ("a",), "seed": 2}, None),
        ({"temperature": 0.7}, {}, "temperature"),
        ({}, {"max_tokens": 7}, "max_tokens"),
        ({"logit_bias": {"1": 2.0}}, {"logit_bias": {"1": 3.0}}, "logit_bias"),
    ],
)
def test_a_setting_that_is_not_given_is_its_default(
    before: dict[str, Any], now: dict[str, Any], changed: str | None
) -> None:
    given: dict[str, Any] = {"response_ids": [3], "logprobs": [0.0], "plain_logprobs": [0.0], "versions": [(0, 0)]}
    call = RecordedCall(call_id="c", policy="policy", prompt_keep=0, prompt_ids=[1, 2], used=before, **given)
    replay = AttemptReplay(RecordedAttempt(rollout_id="r", calls=[call]))
    found = replay.take("policy", np.array([1, 2], np.int32), now)
    assert (found is None) == (changed is not None)
    assert changed is None or (replay.divergence is not None and changed in replay.divergence.cause)


async def test_what_is_not_in_the_record_is_refused_where_that_is_wanted(site: Site) -> None:
    await by_chat(site, "What is 2 + 3?")
    calls = await site.close()
    forked = await fork(site, await recorded(site, calls, 2, diverged="refuse"))
    for _ in range(2):  # it stays refused
        with pytest.raises(openai.BadRequestError, match="a clock, random numbers") as caught:
            await by_chat(forked, "What is 2 + 9?")
        assert caught.value.code == "fork_diverged"
    whole = await fork(site, await recorded(site, calls, 2, diverged="refuse"))
    assert len(await by_chat(whole, "What is 2 + 3?")) == 3, "past its end it goes on"


async def test_agents_at_the_same_time_find_their_own(site: Site) -> None:
    questions = [f"What is {n} + 3?" for n in range(2, 8)]

    async def ask(which: Site, question: str) -> str | None:
        async with which.client(default_headers={"x-agl-agent": question[8]}) as client:
            answer = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": question}], n=2
            )
            return answer.choices[0].message.content

    told = [await ask(site, question) for question in questions]
    calls = await site.close()
    forked = await fork(site, await recorded(site, calls, len(calls)))
    before = len(site.engine.params)
    assert await asyncio.gather(*(ask(forked, question) for question in reversed(questions))) == told[::-1]
    assert len(site.engine.params) == before
    assert len(await forked.close()) == len(calls) == 12


async def test_a_fork_of_a_fork_and_one_that_is_served_again(site: Site) -> None:
    await by_chat(site, "What is 2 + 3?")
    calls = await site.close()
    first = await fork(site, await recorded(site, calls, 1))
    await by_chat(first, "What is 2 + 3?")
    between = await first.close()
    second = await fork(first, await recorded(first, between, 2))
    await by_chat(second, "What is 2 + 3?")
    found = await second.close()
    assert same(found[0], calls[0])
    assert same(found[1], between[1])
    assert [call.info.trained for call in found] == [False, False, True]


async def test_forks_do_not_grow_the_store_by_their_record(site: Site) -> None:
    await by_chat(site, "What is 2 + 3?")
    recording = await recorded(site, await site.close(), 2)
    assert sum(len(call.prompt_ids) for call in recording.calls[1:]) < len(recording.calls[0].prompt_ids)
    update = await site.store.add_resources({"recording": recording})
    rollouts = [await site.store.enqueue_rollout(input={}, resources_id=update.resources_id) for _ in range(50)]
    assert {rollout.resources_id for rollout in rollouts} == {update.resources_id}
    assert len(json.dumps(rollouts[0].model_dump(mode="json"))) < 2000


_TOKENS = "SELECT SUM(length(ids) + COALESCE(length(logprobs), 0) + COALESCE(length(plain_logprobs), 0)) FROM segments"
_SAID = "SELECT SUM(length(attributes) + COALESCE(length(texts), 0)) FROM spans WHERE attempt_id = ?"


@pytest.mark.parametrize("words", [3, 200])
async def test_twenty_forks_store_no_token_of_their_record(rendering: Any, tmp_path: Path, words: int) -> None:
    """However long it is, with the original in the same store; a gateway that takes over stores none again, either."""
    store: Any = SqliteLightningStore(tmp_path / "store.db")
    engine, question = ScriptedEngine(rendering, calculator), "What is 2 + 3?" + " Say it." * words

    def stored(text: str = _TOKENS, *given: str) -> int:
        with closing(sqlite3.connect(tmp_path / "store.db")) as database:
            return int(database.execute(text, given).fetchone()[0])

    async def go_on(which: Site, messages: list[Any], turns: int) -> None:
        async with which.client() as client:
            for _ in range(turns):
                answer = await client.chat.completions.create(model="policy", messages=messages, tools=[CALC])
                messages += [message := answer.choices[0].message]
                messages += [tool_result(call.id) for call in message.tool_calls or ()]

    claimed = await store.start_rollout(input={})
    async with Gateway(store, engine, rendering, secret=b"x" * 32) as gateway:
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        await go_on(site, [{"role": "user", "content": question}], 2)
        calls = await site.close()
        before = stored()
        assert before >= 4 * len(calls[-1].prompt_ids)
        last, recording = site, await recorded(site, calls, 2)
        for number in range(20):
            if number == 10:  # a fork of a fork
                recording = await recorded(last, await last.close(), 2)
            last = await fork(site, recording)
            await go_on(last, [{"role": "user", "content": question}], 2)
            assert [same(a, b) for a, b in zip(await last.close(), calls, strict=True)] == [True, True]
        assert stored() == before
        assert stored(_SAID, last.attempt_id) < 1500, "nor what was said"
        kept = ("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.tool.definitions")
        told = [[span.attributes.get(name) for name in kept] for which in (site, last) for span in await which.spans()]
        assert told[:2] == told[2:]
        forked, messages = await fork(site, recording), [{"role": "user", "content": question}]
        await go_on(forked, messages, 1)
    async with Gateway(store, engine, rendering, secret=b"x" * 32) as gateway:
        forked.gateway = gateway
        await go_on(forked, messages, 1)
        assert [same(a, b) for a, b in zip(await forked.close(), calls, strict=True)] == [True, True]
    assert stored() == before
    await store.close()


async def test_a_gateway_that_is_started_anew_goes_on(rendering: Any) -> None:
    store = InMemoryLightningStore()
    engine = ScriptedEngine(rendering, calculator)
    secret = b"x" * 32

    async def turn(which: Site, messages: list[Any]) -> None:
        async with which.client() as client:
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=[CALC])
        message = answer.choices[0].message
        results = [tool_result(call.id) for call in message.tool_calls or ()]
        messages += [message, *(results or [{"role": "user", "content": "What is 4 + 4?"}])]

    async with Gateway(store, engine, rendering, secret=secret) as gateway:
        claimed = await store.start_rollout(input={})
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        await by_chat(site, "What is 2 + 3?")
        calls = await site.close()
        forked = await fork(site, await recorded(site, calls, 2))
        messages: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
        await turn(forked, messages)
    before = len(engine.params)
    for sampled in (0, 1):  # the second call is in the record, the third is not
        async with Gateway(store, engine, rendering, secret=secret) as gateway:
            await turn(Site(store, engine, gateway, forked.rollout_id, forked.attempt_id), messages)
        assert len(engine.params) == before + sampled
    found = (await store.query_calls([forked.rollout_id]))[forked.rollout_id]
    assert [REPLAYED in call.info.used for call in found] == [True, True, False]
    assert not [call.info.divergence for call in found if call.info.divergence]
    await store.close()


async def test_an_answer_that_did_not_reach_its_client_is_given_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = await by_chat(site, "What is 2 + 3?")
    calls = await site.close()
    forked = await fork(site, await recorded(site, calls, 3))
    real, hung = sampler.recorded_chunks, asyncio.Event()

    async def hangs(*given: Any) -> Any:
        hung.set()
        await asyncio.sleep(60)
        async for chunk in real(*given):
            yield chunk

    monkeypatch.setattr(sampler, "recorded_chunks", hangs)
    asking = asyncio.create_task(by_chat(forked, "What is 2 + 3?"))
    await hung.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    monkeypatch.setattr(sampler, "recorded_chunks", real)
    for _ in range(500):  # until the gateway has noticed
        if not forked.gateway.open_calls(forked.rollout_id, forked.attempt_id):
            break
        await asyncio.sleep(0.01)
    before = len(site.engine.params)
    assert await by_chat(forked, "What is 2 + 3?") == told
    assert len(site.engine.params) == before


async def test_an_answer_that_no_choice_began_with_is_given_again(site: Site) -> None:
    async def ask(which: Site, *prompts: list[int]) -> None:
        async with which.client() as client:
            await client.completions.create(model="policy", prompt=list(prompts))

    await ask(site, [5, 6, 7])
    forked = await fork(site, await recorded(site, await site.close(), 1))
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        await ask(forked, [5, 6, 7], [999_999])
    before = len(site.engine.params)
    await ask(forked, [5, 6, 7])
    assert len(site.engine.params) == before


# ---- edits ---------------------------------------------------------------------------------------------------------


def prompt_of(site: Site, call: Call) -> str:
    return site.engine.rendering.decode(call.prompt_ids)


def edited_in(call: Call) -> list[tuple[str, int]]:
    return [(one["role"], one["index"]) for one in call.info.used.get(EDITED, ())]


def check_continues(call: Call, earlier: Call) -> None:
    """The prompt goes on from the earlier call, token by token."""
    before = [*earlier.prompt_ids.tolist(), *earlier.response_ids.tolist()]
    assert call.prompt_ids[: len(before)].tolist() == before
    assert call.info.parent_call_id == earlier.info.call_id


@pytest.mark.parametrize("dialect", TALKS)
async def test_the_model_gets_the_edited_message_and_the_agent_does_not_see_it(site: Site, dialect: str) -> None:
    talk = TALKS[dialect]
    told = await talk(site, "What is 2 + 3?")
    calls = await site.close()
    forked = await fork(site, await recorded(site, calls, 1, edits={"tool": "a number like 7"}))
    again = await talk(forked, "What is 2 + 3?")
    assert again[0] == told[0]
    assert "The answer is a number like 7." in json.dumps(again[1])
    found = await forked.close()
    assert same(found[0], calls[0])
    assert "a number like 7" in prompt_of(site, found[1])
    assert [edited_in(call)[0][0] if edited_in(call) else None for call in found] == [None, "tool", "tool"]
    forked.check_exact(found[1:])
    check_continues(found[1], found[0])
    check_continues(found[2], found[1])
    said = [span.attributes.get("gen_ai.input.messages", "") for span in await forked.spans()]
    assert "a number like 7" in said[1]
    assert not [call.info.divergence for call in found if call.info.divergence]


async def test_every_role_is_edited_and_stays_so_in_later_calls(site: Site) -> None:
    async def talk(which: Site) -> None:
        async with which.client() as client:
            messages: list[Any] = [
                {"role": "developer", "content": "Use the tool."},
                {"role": "user", "content": "What is 2 + 3?"},
            ]
            for n in range(4):
                answer = await client.chat.completions.create(model="policy", messages=messages, tools=[CALC])
                message = answer.choices[0].message
                results = [tool_result(call.id) for call in message.tool_calls or ()]
                messages += [message, *(results or [{"role": "user", "content": f"Number {n}?"}])]

    await talk(site)
    calls = await site.close()
    edits = {"system": "Be terse.", "user": "Sure?", "assistant": "It is 9.", "tool": "nine"}
    forked = await fork(site, await recorded(site, calls, 2, edits=edits))
    await talk(forked)
    first, second, third, fourth = await forked.close()
    assert [same(first, calls[0]), same(second, calls[1])] == [True, True]
    shown = prompt_of(site, third)
    assert all(text in shown for text in ("What is 2 + 3?", *edits.values()))
    assert not [text for text in ("Use the tool.", "Number 1?", "The answer is 5.") if text in shown]
    places = [("system", 0), ("user", 5), ("assistant", 4), ("tool", 3)]
    assert [edited_in(call) for call in (first, second, third, fourth)] == [[], [], places, places]
    check_continues(fourth, third)
    forked.check_exact([third, fourth])


async def test_a_call_without_such_a_message_is_refused_by_its_roles(site: Site) -> None:
    forked = await fork(site, RecordedAttempt(rollout_id="ro-1", calls=[], edits={"tool": "7"}))
    for _ in range(2):  # it stays refused
        with pytest.raises(openai.BadRequestError, match=r"role 'tool'.* messages of the roles user") as caught:
            await by_chat(forked, "What is 2 + 3?")
        assert caught.value.code == "edit_without_message"
    async with forked.client() as client:
        with pytest.raises(openai.BadRequestError, match="a raw prompt"):
            await client.completions.create(model="policy", prompt="What is")
    assert await forked.close() == []
    assert not site.engine.params


async def test_each_conversation_is_edited_in_its_first_call_after_the_record_or_not_at_all(site: Site) -> None:
    async def ask(*messages: Any, model: str = "policy", **headers: str) -> Any:
        async with forked.client(default_headers=headers) as client:
            given: Any = [{"role": role, "content": text} for role, text in messages]
            answer = await client.chat.completions.create(model=model, messages=given)
            return answer.choices[0].message.content

    site.engine.script = lambda prompt, _: f"said {len(prompt)}"
    forked = await fork(site, RecordedAttempt(rollout_id="ro-1", calls=[], edits={"system": "Be terse."}))
    main = ("system", "Help."), ("user", "Hello.")
    said = await ask(*main)
    await ask(*main, ("assistant", said), ("user", "And?"))
    await ask(("system", "You plan."), ("user", "Plan."))
    plain = await ask(("user", "A title, please."))
    await ask(("user", "A title, please."), ("assistant", plain), ("system", "Late."), ("user", "Another."))
    await ask(("system", "Grade it."), ("user", "Hello."), **{"x-agl-role": "judge"})
    await site.gateway.update_model_list({"frozen": Frozen(site.engine, site.engine.rendering)})
    await ask(("system", "Be a user."), ("user", "Hello."), model="frozen")
    found = await forked.close()
    assert [bool(edited_in(call)) for call in found] == [*[True] * 3, *[False] * 4]
    assert ["Be terse." in prompt_of(site, call) for call in found] == [*[True] * 3, *[False] * 4]


async def test_one_that_leaves_the_record_is_edited_from_there_on(site: Site) -> None:
    await by_chat(site, "What is 2 + 3?")
    calls = await site.close()
    forked = await fork(site, await recorded(site, calls, 3, edits={"user": "What is 6 + 6?"}))
    await by_chat(forked, "What is 2 + 9?")
    found = await forked.close()
    first = found[0].info.divergence
    assert first is not None
    assert "the prompt differs from the recorded one at token" in first.cause
    assert [edited_in(call) for call in found] == [[("user", 0)]] * 3
    assert all("6 + 6" in prompt_of(site, call) for call in found)
    forked.check_exact(found)
    refused = await fork(site, await recorded(site, calls, 3, edits={"user": "6 + 6"}, diverged="refuse"))
    for _ in range(2):
        with pytest.raises(openai.BadRequestError, match="a clock, random numbers"):
            await by_chat(refused, "What is 2 + 9?")


async def test_a_request_with_a_recorded_choice_is_not_edited(site: Site) -> None:
    async def ask(which: Site) -> None:
        async with which.client() as client:
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "What is 2 + 3?"}], n=2
            )

    await ask(site)
    calls = await site.close()
    forked = await fork(site, await recorded(site, calls, 1, edits={"user": "What is 6 + 6?"}))
    await ask(forked)
    found = await forked.close()
    assert [(REPLAYED in call.info.used, edited_in(call)) for call in found] == [(True, []), (False, [])]


async def test_edits_go_on_at_a_gateway_that_is_started_anew(rendering: Any) -> None:
    store, secret = InMemoryLightningStore(), b"x" * 32
    engine = ScriptedEngine(rendering, calculator)
    tool: Any = {"type": "function", "strict": False, **CALC["function"]}
    previous: Any = None

    async def turn(which: Site) -> Any:
        calls = [] if previous is None else [item for item in previous.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "5"} for call in calls]
        given: Any = results or [{"role": "user", "content": "What is 2 + 3?"}]
        async with which.client() as client:
            return await client.responses.create(
                model="policy", input=given, tools=[tool], previous_response_id=previous.id if previous else None
            )

    async with Gateway(store, engine, rendering, secret=secret) as gateway:
        claimed = await store.start_rollout(input={})
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        previous = await turn(site)
        calls = await site.close()
        forked = await fork(site, await recorded(site, calls, 1, edits={"assistant": "Let me see.", "tool": "8"}))
        previous = None
        previous = await turn(forked)
    for last in (False, True):
        async with Gateway(store, engine, rendering, secret=secret) as forked.gateway:
            previous = await turn(forked)
            if last:
                summary = await forked.gateway.close_attempt(forked.rollout_id, forked.attempt_id)
                assert (summary.calls, summary.lost) == (3, None)
    found = await forked.store.query_calls([forked.rollout_id])
    found = list(found[forked.rollout_id])
    assert [edited_in(call) for call in found] == [[], *[[("assistant", 1), ("tool", 2)]] * 2]
    assert all("Let me see." in rendering.decode(call.prompt_ids) for call in found[1:])
    check_continues(found[2], found[1])
    forked.check_exact(found[1:])
    await store.close()


def test_a_record_that_was_stored_without_edits_has_none() -> None:
    assert RecordedAttempt.model_validate({"rollout_id": "ro-1", "calls": []}).edits == {}
