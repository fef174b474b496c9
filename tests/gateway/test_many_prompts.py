"""Lists of prompts on Completions: each is a call of its own, the choices of all are one answer."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.gateway.conftest import Site


def echoes(prompt: str, _params: object) -> str:
    return f" {prompt}!"


PROMPTS = ["one", "two two", "three"]


@pytest.fixture
def script() -> Any:
    return echoes


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("tokens", [False, True])
async def test_each_prompt_is_a_call_and_choices_are_in_order(site: Site, n: int, tokens: bool) -> None:
    encode = site.engine.rendering.encode
    prompts: Any = [encode(p).tolist() for p in PROMPTS] if tokens else PROMPTS
    async with site.client() as client:
        raw: Any = await client.completions.create(
            model="policy", prompt=prompts, n=n, logprobs=0, extra_body={"return_token_ids": True}
        )
        another: Any = await client.completions.create(model="policy", prompt="one")
    wanted = [f" {prompt}!" for prompt in PROMPTS for _ in range(n)]
    assert [choice.index for choice in raw.choices] == list(range(3 * n))
    assert [choice.text for choice in raw.choices] == wanted
    assert [c.prompt_token_ids for c in raw.choices] == [encode(p).tolist() for p in PROMPTS for _ in range(n)]
    assert raw.usage.prompt_tokens == sum(len(encode(p)) for p in PROMPTS)
    calls = await site.close()
    site.check_exact(calls)
    assert len({call.info.call_id for call in calls}) == len(calls) == 3 * n + 1
    asked = {(call.info.response_id, site.engine.rendering.decode(call.prompt_ids)) for call in calls}
    assert asked == {(raw.id, "one"), (f"{raw.id}.1", "two two"), (f"{raw.id}.2", "three"), (another.id, "one")}


async def test_streamed_choices_have_the_places_of_their_prompts(site: Site) -> None:
    texts: dict[int, str] = {}
    async with site.client() as client:
        stream: Any = await client.completions.create(
            model="policy", prompt=PROMPTS, n=2, stream=True, stream_options={"include_usage": True}
        )
        ends, usage = [], None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                ends += [choice.index] * bool(choice.finish_reason)
    assert texts == dict(enumerate(f" {prompt}!" for prompt in PROMPTS for _ in range(2)))
    assert sorted(ends) == list(range(6))
    assert usage is not None
    assert usage.prompt_tokens == sum(len(site.engine.rendering.encode(p)) for p in PROMPTS)


@pytest.mark.parametrize("prompt", [[], [""], ["a", ""], ["a", 5], [[]], [[1], [True]], [["a"]], ["a"] * 129])
async def test_what_is_no_list_of_prompts_is_refused(site: Site, prompt: Any) -> None:
    async with site.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="policy", prompt=prompt)
    assert refused.value.param == "prompt"
    assert not await site.close()


async def test_a_prompt_too_long_refuses_all_before_anything_is_sampled(site: Site) -> None:
    async with site.client() as client:
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model="policy", prompt=["a", "b c " * 4096])
        assert not site.engine.params
        await client.completions.create(model="policy", prompt=["b c " * 1200, "a b c " * 600])  # each fits, not both


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat", "completions"])
async def test_the_stop_string_is_shown_if_that_is_asked(site: Site, stream: bool, path: str) -> None:
    site.engine.script = lambda _prompt, _params: "One. Two. Three."
    shown: dict[bool, str] = {}
    for shows in (False, True):
        fields: dict[str, Any] = {"model": "policy", "stop": "Two.", "stream": stream}
        fields["extra_body"] = {"include_stop_str_in_output": shows}
        async with site.client() as client:
            if path == "chat":
                answer: Any = await client.chat.completions.create(
                    messages=[{"role": "user", "content": "?"}], **fields
                )
            else:
                answer = await client.completions.create(prompt="?", **fields)
            parts = [part async for part in answer] if stream else [answer]
        choices = [choice for part in parts for choice in part.choices]
        if path == "completions":
            texts = [choice.text for choice in choices]
        else:
            texts = [(choice.delta if stream else choice.message).content or "" for choice in choices]
        shown[shows] = "".join(texts)
    assert shown[True] == shown[False].rstrip() + " Two."
    assert shown[False].rstrip() == "One."
