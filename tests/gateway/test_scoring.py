"""Log-probs of prompts: OpenAI's `echo`, vLLM's `prompt_logprobs`, and requests that want nothing sampled."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from agentlightning.algorithm.parts.teacher import KEY, EndpointTeacher
from agentlightning.types.call import left_out_of
from tests.gateway.conftest import Site

TEXT = " Yes, it is."
PROMPT = "Is it so?"
ASK: Any = [{"role": "user", "content": PROMPT}]


@pytest.fixture
def script() -> Any:
    return lambda _prompt, _params: TEXT


async def complete(site: Site, stream: bool, **fields: Any) -> list[Any]:
    """The choices of an answer, those of a stream put together."""
    extra = {name: fields.pop(name) for name in ("prompt_logprobs", "return_tokens_as_token_ids") if name in fields}
    async with site.client() as client:
        create: Any = client.completions.create
        answer = await create(model="policy", stream=stream, extra_body=extra, **fields)
        if not stream:
            return answer.choices
        choices: dict[int, Any] = {}
        async for chunk in answer:
            for part in chunk.choices:
                text = choices[part.index].text + part.text if part.index in choices else part.text
                choices[part.index] = part
                part.text = text
        return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("most", [0, 50])
@pytest.mark.parametrize("tokens", [False, True])
async def test_a_prompt_is_repeated_with_its_log_probs(site: Site, stream: bool, most: int, tokens: bool) -> None:
    rendering = site.engine.rendering
    ids = rendering.encode(PROMPT).tolist()
    prompt: Any = ids if tokens else PROMPT
    (choice,) = await complete(site, stream, prompt=prompt, max_tokens=most, logprobs=2, echo=True)
    assert choice.text == PROMPT + (TEXT if most else "")
    told = choice.logprobs
    names = [rendering.token_text(token) for token in ids]
    assert told.tokens[: len(ids)] == names
    assert told.token_logprobs[: len(ids)] == [None, *(-float(place) for place in range(1, len(ids)))]
    others = {rendering.token_text(token): -float(token) for token in (1, 2)}
    assert told.top_logprobs[: len(ids)] == [None, *[others] * (len(ids) - 1)]
    assert told.text_offset[: len(ids)] == [sum(map(len, names[:at])) for at in range(len(ids))]
    lengths = {len(told.tokens), len(told.token_logprobs), len(told.top_logprobs), len(told.text_offset)}
    assert lengths == {len(ids)} if not most else min(lengths) == max(lengths) > len(ids)
    (call,) = await site.close()
    assert call.prompt_ids.tolist() == ids
    assert (len(call.response_ids) > 0, call.info.trained) == (bool(most), bool(most)), "nothing sampled trains nothing"
    assert call.info.error is None


async def test_echo_without_log_probs_scores_nothing(site: Site) -> None:
    (choice,) = await complete(site, False, prompt=PROMPT, echo=True)
    assert (choice.text, choice.logprobs) == (PROMPT + TEXT, None)
    assert [params.prompt_logprobs for params in site.engine.params] == [None]


@pytest.mark.parametrize("stream", [False, True])
async def test_vllms_prompt_logprobs(site: Site, stream: bool) -> None:
    """Of each prompt, and in the chat; the token's own log-prob has a rank where it is among the alternatives."""
    prompts = [PROMPT, "No?"]
    for choice, text in zip(await complete(site, stream, prompt=prompts, prompt_logprobs=1), prompts, strict=True):
        check_rows(site, choice.prompt_logprobs, site.engine.rendering.encode(text).tolist())
        assert (choice.text, choice.logprobs) == (TEXT, None)
    extra: dict[str, Any] = {"prompt_logprobs": 1, "return_token_ids": True}
    async with site.client() as client:
        create: Any = client.chat.completions.create
        got = await create(model="policy", messages=ASK, stream=stream, extra_body=extra)
        if stream:
            got = [chunk async for chunk in got][-1]
    check_rows(site, got.prompt_logprobs, got.prompt_token_ids)
    site.check_exact(await site.close())


def check_rows(site: Site, rows: Any, ids: list[int]) -> None:
    assert rows[0] is None
    assert len(rows) == len(ids)
    for place, (row, token) in enumerate(zip(rows[1:], ids[1:], strict=True), 1):
        text = site.engine.rendering.token_text(token)
        own = {"logprob": -float(place), "rank": None, "decoded_token": text}
        best = {"logprob": -1.0, "rank": 1, "decoded_token": site.engine.rendering.token_text(1)}
        assert row == ({str(token): own, "1": best} if token != 1 else {"1": best})


async def test_a_chat_that_wants_nothing_sampled(site: Site) -> None:
    """Nothing is gone on from: the next turn finds no empty answer before it."""
    async with site.client() as client:
        create: Any = client.chat.completions.create
        empty = await create(model="policy", messages=ASK, max_tokens=0, extra_body={"prompt_logprobs": 0})
        whole = await create(model="policy", messages=ASK)
    assert (empty.choices[0].message.content, empty.choices[0].finish_reason) == ("", "length")
    assert empty.usage.completion_tokens == 0
    assert all(len(row) == 1 for row in empty.prompt_logprobs[1:])
    assert whole.choices[0].message.content == TEXT.strip()
    calls = await site.close()
    assert [call.info.trained for call in calls] == [False, True]
    assert [call.info.divergence for call in calls] == [None, None]


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_an_engine_that_cannot_score_says_so(site: Site, logprobs: int | None) -> None:
    site.engine.scores_prompts = False
    async with type(site.gateway)(site.store, site.engine, site.engine.rendering) as gateway:
        other = Site(site.store, site.engine, gateway, site.rollout_id, site.attempt_id)
        if logprobs is None:
            (choice,) = await complete(other, False, prompt=PROMPT, echo=True, prompt_logprobs=1)
            assert choice.text == PROMPT + TEXT
            await other.close()
            told = [(one.field, one.kind) for one in left_out_of(await other.spans())]
            assert told == [("prompt_logprobs", "unavailable")]
        else:
            with pytest.raises(openai.BadRequestError) as refused:
                await complete(other, False, prompt=PROMPT, echo=True, logprobs=logprobs)
            assert refused.value.param == "echo"


async def test_a_model_that_is_served_here_can_be_a_teacher(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site.client() as client:
        await client.chat.completions.create(model="policy", messages=ASK)
    (call,) = await site.close()
    another = await site.another()
    monkeypatch.setenv(KEY, another.key)
    (found,) = await EndpointTeacher(another.base_url, "policy").logprobs([call])
    first = len(call.prompt_ids)
    assert found.tolist() == [-float(place) for place in range(first, first + len(call.response_ids))]


@pytest.mark.parametrize("wrong", [{"prompt_logprobs": -1}, {"prompt_logprobs": "all"}, {"max_tokens": -1}])
async def test_what_makes_no_sense_is_refused_by_name(site: Site, wrong: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await complete(site, False, prompt=PROMPT, **wrong)
    assert refused.value.param == next(iter(wrong))
