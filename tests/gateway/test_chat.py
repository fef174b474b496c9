"""Chat completions through the official client, over real HTTP."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import openai
import pytest

from agentlightning.gateway.dialects.chat import ChatDialect
from agentlightning.rendering import RenderersRendering
from agentlightning.types import RolloutMode
from tests.gateway.conftest import CALC, Site, call_text

ASK: Any = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": "What is 2 + 3?"}]


async def test_a_two_turn_agent_with_tools_is_recorded_exactly(site: Site) -> None:
    async with site.client() as client:
        first = await client.chat.completions.create(model="policy", messages=ASK, tools=[CALC])
        message = first.choices[0].message
        assert first.object == "chat.completion"
        assert first.created > 0
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.tool_calls
        call = message.tool_calls[0]
        assert call.type == "function"
        assert call.function.arguments == '{"a": 2, "b": 3}'
        history = [*ASK, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "5"}]
        second = await client.chat.completions.create(model="policy", messages=history, tools=[CALC])
    assert second.choices[0].message.content == "The answer is 5."
    assert second.choices[0].finish_reason == "stop"
    assert second.usage
    assert second.usage.total_tokens == second.usage.prompt_tokens + second.usage.completion_tokens

    calls = await site.close()
    assert [c.info.response_id for c in calls] == [first.id, second.id]
    site.check_exact(calls)
    # The second prompt holds the first response token by token, though the tool call was not written as JSON is dumped.
    before = calls[0].prompt_ids.tolist() + calls[0].response_ids.tolist()
    assert calls[1].prompt_ids[: len(before)].tolist() == before
    assert calls[1].info.parent_call_id == calls[0].info.call_id
    assert calls[1].info.divergence is None


async def test_streams_arrive_token_by_token_and_say_the_same(site: Site) -> None:
    site.engine.script = lambda prompt, params: "Hello there, ünïcödé 🙂 world."
    async with site.client() as client:
        stream = await client.chat.completions.create(
            model="policy", messages=ASK, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    texts = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert "".join(texts) == "Hello there, ünïcödé 🙂 world."
    assert len(texts) > 5
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens > 5
    site.check_exact(await site.close())


async def test_a_streamed_tool_call_comes_parsed(site: Site) -> None:
    site.engine.script = lambda prompt, params: "Let me see.\n" + call_text(7, 8)
    async with (
        site.client() as client,
        client.chat.completions.stream(model="policy", messages=ASK, tools=[CALC]) as stream,
    ):
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.tool_calls
    assert choice.message.tool_calls[0].function.name == "calc"


async def test_reasoning_comes_apart_in_streams_and_not(site: Site) -> None:
    site.engine.script = lambda prompt, params: "<think>\nTwo and three.\n</think>\n\nFive."
    async with site.client() as client:
        whole = await client.chat.completions.create(model="policy", messages=ASK)
        stream = await client.chat.completions.create(model="policy", messages=ASK, stream=True)
        deltas = [c.choices[0].delta.model_dump() async for c in stream if c.choices]
    assert whole.choices[0].message.content == "Five."
    assert whole.choices[0].message.model_dump()["reasoning_content"] == "Two and three."
    assert "".join(d.get("content") or "" for d in deltas) == "Five."
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == "Two and three."


async def test_n_choices_share_their_prompt_and_are_calls_of_their_own(site: Site) -> None:
    async with site.client() as client:
        reply = await client.chat.completions.create(model="policy", messages=ASK, n=3, seed=5)
    assert [c.index for c in reply.choices] == [0, 1, 2]
    calls = await site.close()
    site.check_exact(calls)
    assert [c.info.call_id for c in calls] == [f"{reply.id}:{i}" for i in range(3)]
    seeds = {params.seed for params in site.engine.params}
    assert len(seeds) == 3


async def test_settings_are_honoured_and_kept(site: Site) -> None:
    site.engine.script = lambda prompt, params: "one two STOP three"
    async with site.client() as client:
        reply = await client.chat.completions.create(
            model="policy",
            messages=ASK,
            temperature=0.0,
            top_p=0.9,
            max_completion_tokens=50,
            stop=["STOP"],
            logprobs=True,
            top_logprobs=2,
            seed=3,
            extra_body={"top_k": 7, "return_token_ids": True},
        )
    choice = reply.choices[0]
    assert choice.message.content == "one two"
    assert choice.logprobs
    assert choice.logprobs.content
    assert "".join(t.token for t in choice.logprobs.content) == "one two STOP"
    assert [len(t.top_logprobs) for t in choice.logprobs.content] == [2] * len(choice.logprobs.content)
    (call,) = await site.close()
    assert choice.model_dump()["token_ids"] == call.response_ids.tolist()
    assert reply.model_dump()["prompt_token_ids"] == call.prompt_ids.tolist()
    params = site.engine.params[0]
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 0.9, 7, 50)
    assert params.seed != 3
    assert call.info.asked["temperature"] == 0.0
    assert call.info.used["temperature"] == 1.0
    assert call.info.temperature == 1.0


async def test_validation_keeps_the_agents_own_settings(site: Site) -> None:
    val = await site.another(RolloutMode.VAL)
    async with val.client() as client:
        await client.chat.completions.create(model="policy", messages=ASK, temperature=0.25, seed=3)
    assert (val.engine.params[0].temperature, val.engine.params[0].seed) == (0.25, 3)


async def test_train_seeds_differ_between_rollouts_and_calls(site: Site) -> None:
    other = await site.another()
    for place in (site, site, other):
        async with place.client() as client:
            await client.chat.completions.create(model="policy", messages=ASK, seed=3)
    assert len({params.seed for params in site.engine.params}) == 3


async def test_required_tools_are_called(site: Site) -> None:
    site.engine.script = lambda prompt, params: call_text(1, 2) if params.grammar else "No."
    async with site.client() as client:
        choices: Any = ("required", {"type": "function", "function": {"name": "calc"}})
        for choice in choices:
            for stream in (False, True):
                async with (
                    client.chat.completions.stream(model="policy", messages=ASK, tools=[CALC], tool_choice=choice)
                    if stream
                    else _plain(client, choice) as reply
                ):
                    found = await reply.get_final_completion()
                calls = found.choices[0].message.tool_calls
                assert calls
                assert (calls[0].function.name, calls[0].function.arguments) == ("calc", '{"a": 1, "b": 2}')
    site.check_exact(await site.close())


class _plain:
    """A plain completion, behind the face of a stream."""

    def __init__(self, client: openai.AsyncOpenAI, choice: Any) -> None:
        self._client, self._choice = client, choice

    async def __aenter__(self) -> _plain:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def get_final_completion(self) -> Any:
        return await self._client.chat.completions.create(
            model="policy",
            messages=ASK,
            tools=[CALC],
            tool_choice=self._choice,
        )


async def test_tool_choice_none_and_single_calls(site: Site) -> None:
    site.engine.script = lambda prompt, params: call_text(1, 2) + "\n" + call_text(3, 4)
    async with site.client() as client:
        none = await client.chat.completions.create(model="policy", messages=ASK, tools=[CALC], tool_choice="none")
        both = await client.chat.completions.create(model="policy", messages=ASK, tools=[CALC])
        one = await client.chat.completions.create(
            model="policy", messages=ASK, tools=[CALC], parallel_tool_calls=False
        )
    assert none.choices[0].message.tool_calls is None
    assert len(both.choices[0].message.tool_calls or ()) == 2
    assert len(one.choices[0].message.tool_calls or ()) == 1
    site.check_exact(await site.close())


async def test_a_broken_tool_call_stays_visible(site: Site) -> None:
    site.engine.script = lambda prompt, params: "Hm.\n<tool_call>\n{nonsense}\n</tool_call>"
    async with site.client() as client:
        reply = await client.chat.completions.create(model="policy", messages=ASK, tools=[CALC])
    assert reply.choices[0].message.content == "Hm.\n<tool_call>\n{nonsense}\n</tool_call>"
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "yaml"}, "response_format"),
        ({"functions": [CALC]}, "functions"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 200}}, "logit_bias.5"),
        ({"logit_bias": {"5": "a"}}, "logit_bias.5"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"model": "gpt-99"}, "model"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(site: Site, body: dict[str, Any], param: str) -> None:
    async with site.client() as client:
        with pytest.raises(openai.APIStatusError) as error:
            await client.chat.completions.create(**{"model": "policy", "messages": ASK, "extra_body": body})
    assert error.value.status_code in (400, 404)
    assert isinstance(error.value.body, dict)
    assert error.value.body["param"] == param


async def test_content_may_be_text_parts_null_or_absent(site: Site) -> None:
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 3?"}]},
        {"role": "assistant", "tool_calls": [_old_call()]},
        {"role": "tool", "tool_call_id": "x", "content": "5"},
        {"role": "assistant", "content": None, "tool_calls": [_old_call()]},
        {"role": "tool", "tool_call_id": "x", "content": None},
    ]
    async with site.client() as client:
        await client.chat.completions.create(model="policy", messages=messages, tools=[CALC], metadata={"a": "b"})
    (call,) = await site.close()
    assert "What is 2 + 3?" in site.engine.rendering.decode(call.prompt_ids)


def _old_call() -> dict:
    return {"id": "x", "type": "function", "function": {"name": "calc", "arguments": '{"a": 2, "b": 3}'}}


@pytest.mark.parametrize("words", [4_200, 7_000, 20_000, 100_000])
@pytest.mark.slow
async def test_the_tokens_of_a_prompt_that_does_not_fit_are_counted_or_said_to_be_more(
    site: Site, rendering: RenderersRendering, words: int
) -> None:
    message: Any = {"role": "user", "content": "word " * words}
    async with site.client() as client:
        with pytest.raises(openai.BadRequestError) as error:
            await client.chat.completions.create(model="policy", messages=[message])
    found = re.search(r"prompt is too long: (\d+) tokens", error.value.message)
    assert found is not None
    counted, there = int(found[1]), len(rendering.render([message], None))
    assert counted == there or (counted < there and "counted no further" in error.value.message)


async def test_a_prompt_that_does_not_fit_is_the_providers_own_error(site: Site) -> None:
    long: Any = [{"role": "user", "content": "word " * 5000}]
    async with site.client() as client:
        streams: Any = (False, True)
        for stream in streams:
            with pytest.raises(openai.BadRequestError) as error:
                await client.chat.completions.create(model="policy", messages=long, stream=stream)
            assert error.value.code == "context_length_exceeded"
    assert (await site.gateway.close_attempt(site.rollout_id, site.attempt_id)).limit
    (span, _) = await site.spans()
    assert span.status.status_code == "ERROR"


async def test_sync_client(site: Site) -> None:
    def ask() -> str | None:
        with openai.OpenAI(base_url=site.base_url, api_key=site.key, max_retries=0) as client:
            assert [m.id for m in client.models.list()] == ["policy", "scripted"]
            parts = client.chat.completions.create(model="policy", messages=ASK, tools=[CALC], stream=True)
            list(parts)
            return client.chat.completions.create(model="policy", messages=ASK).choices[0].message.content

    assert await asyncio.to_thread(ask)


@pytest.mark.slow
async def test_many_log_probs_are_written_beside_the_event_loop(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    respond = ChatDialect.respond

    def watched(*given: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return respond(*given)

    monkeypatch.setattr(ChatDialect, "respond", watched)
    async with site.client() as client:
        few = await client.chat.completions.create(model="policy", messages=ASK, logprobs=True, top_logprobs=2)
        many = await client.chat.completions.create(model="policy", messages=ASK, logprobs=True, top_logprobs=20, n=128)
    assert [name.startswith("agl-gateway-large") for name in threads] == [False, True]
    rows = [choice.logprobs.content for choice in many.choices if choice.logprobs is not None]
    assert len(rows) == 128
    assert few.choices[0].logprobs is not None
    assert [row.token for row in rows[0] or ()] == [row.token for row in few.choices[0].logprobs.content or ()]
