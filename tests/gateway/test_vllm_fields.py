"""What vLLM's and SGLang's clients send beside OpenAI's fields: honoured where it has a meaning here, else left out."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from agentlightning.types.call import left_out_of
from tests.gateway.conftest import Site
from tests.gateway.test_structured import GOOD, SCHEMA, Reader, accepts, check, reader

__all__ = ["reader"]
ASK: Any = [{"role": "user", "content": "Well?"}]
LARK = 'start: WORD "!"\nWORD: /[a-z]+/'
TEXTS: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"guided_choice": ["yes", 'no "never"']}, 'no "never"', ["maybe", '"yes"', ""]),
    ({"structured_outputs": {"choice": ["a/b", "c"]}}, "a/b", ["a", "ab"]),
    ({"guided_regex": r"[0-9]{2}/[a-z]+"}, "12/ab", ["1/ab", "12/"]),
    ({"regex": "(x|y)+"}, "xyx", ["", "z"]),
    ({"structured_outputs": {"regex": "(x|y)+"}}, "xyx", ["", "z"]),
    ({"guided_grammar": LARK}, "well!", ["well", "9!"]),
    ({"structured_outputs": {"grammar": LARK}}, "well!", ["well", "9!"]),
    ({"ebnf": 'root ::= "a" | "b" root'}, "bba", ["ab", ""]),
]
JSONS: list[dict[str, Any]] = [
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    {"json_schema": json.dumps(SCHEMA)},
]


async def ask(site: Site, path: str, fields: dict[str, Any]) -> str:
    async with site.client() as client:
        if path == "chat":
            chat: Any = await client.chat.completions.create(model="policy", messages=ASK, extra_body=fields)
            return chat.choices[0].message.content
        raw: Any = await client.completions.create(model="policy", prompt="Well?", extra_body=fields)
        return raw.choices[0].text


@pytest.mark.parametrize("path", ["chat", "completions"])
@pytest.mark.parametrize("fields", JSONS)
async def test_json_by_its_schema(site: Site, reader: Reader, path: str, fields: dict[str, Any]) -> None:
    site.engine.script = lambda _prompt, _params: GOOD
    assert await ask(site, path, {**fields, "max_tokens": 100}) == GOOD
    grammar = site.engine.params[0].grammar
    if path == "chat":
        check(reader, grammar)
        return
    assert accepts(reader, grammar, GOOD)
    assert not accepts(reader, grammar, f"<think>\nSo.\n</think>\n\n{GOOD}"), "a raw text has no reasoning"


@pytest.mark.quick_with("fields4")
@pytest.mark.parametrize("path", ["chat", pytest.param("completions", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [text if "structured_outputs" in text[0] else pytest.param(*text, marks=pytest.mark.slow) for text in TEXTS],
)
async def test_texts_by_choice_expression_and_grammar(
    site: Site, reader: Reader, path: str, fields: dict[str, Any], good: str, bad: list[str]
) -> None:
    site.engine.script = lambda _prompt, _params: good
    assert await ask(site, path, fields) == good
    grammar = site.engine.params[0].grammar
    assert accepts(reader, grammar, good)
    assert not any(accepts(reader, grammar, text) for text in bad)


@pytest.mark.quick_with("fields1", "fields2", "fields3", "fields4", "fields5", "fields8")
@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "(("},
        {"guided_regex": 5},
        {"guided_choice": []},
        {"guided_choice": "yes"},
        {"guided_json": "{"},
        {"guided_json": []},
        {"guided_grammar": "start: nothing"},
        *({"ebnf": text} for text in ("root ::= (", " ", "root ::= a", 'root ::= "\\', "\0", "%", 'root ::= "a"{3,1}')),
        {"structured_outputs": 5},
        {"structured_outputs": {"regex": "(("}},
        {"stop_token_ids": ["a"]},
        {"stop_token_ids": 5},
        {"continue_final_message": True},
        {"continue_final_message": 5},
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(site: Site, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(site, "chat", fields)
    assert str(refused.value.param).startswith(next(iter(fields)))


async def test_stop_token_ids_end_an_answer_and_are_no_part_of_its_text(site: Site) -> None:
    (stop,) = site.engine.rendering.encode("!").tolist()
    site.engine.script = lambda _prompt, _params: "Stop!"
    for path in ("chat", "completions"):
        assert await ask(site, path, {"stop_token_ids": [stop]}) == "Stop"
        assert site.engine.params[-1].stop_token_ids == (stop,)
    site.check_exact(await site.close())


@pytest.mark.parametrize("path", ["chat", "completions"])
async def test_how_many_tokens_there_are_at_least(site: Site, path: str) -> None:
    await ask(site, path, {"min_tokens": 5, "max_tokens": 3, "ignore_eos": True})
    assert [(p.min_tokens, p.ignore_eos) for p in site.engine.params] == [(3, True)], "no more than there may be"
    for wrong in ({"min_tokens": -1}, {"min_tokens": 1.5}, {"ignore_eos": "yes"}):
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(site, path, wrong)
        assert refused.value.param == next(iter(wrong))


async def test_the_rest_is_left_out_and_told(site: Site) -> None:
    fields = {
        "length_penalty": 2,
        "top_logprobs": 3,
    }
    neutral = {"ignore_eos": False, "add_generation_prompt": True, "continue_final_message": False, "min_tokens": 0}
    await ask(site, "chat", neutral)
    await ask(site, "chat", {**fields, "priority": 1, "skip_special_tokens": False})
    await site.close()
    told = {one.field: one.kind for one in left_out_of(await site.spans())}
    assert told == {**dict.fromkeys(fields, "unavailable"), "priority": "harmless"}


def thinks(_prompt: str, _params: object) -> str:
    return "<think>\nSo it is.\n</think>\n\nYes."


@pytest.mark.parametrize("script", [thinks])
async def test_reasoning_tokens_are_counted(site: Site) -> None:
    (close,) = site.engine.rendering.encode("</think>").tolist()
    async with site.client() as client:
        chat: Any = await client.chat.completions.create(model="policy", messages=ASK)
        response: Any = await client.responses.create(model="policy", input=ASK)
    for call in await site.close():
        counted = call.response_ids.tolist().index(close) + 1
        assert chat.usage.completion_tokens_details.reasoning_tokens == counted
        assert response.usage.output_tokens_details.reasoning_tokens == counted


async def test_special_tokens_are_left_out_of_a_raw_text_on_request(site: Site) -> None:
    """And only of the text: the tokens stay those that were sampled."""
    site.engine.script = lambda _prompt, _params: "One<|im_start|> two."
    ids = site.engine.rendering.encode("One<|im_start|> two.").tolist()
    ask_raw: dict[str, Any] = {"model": "policy", "prompt": "Well?", "logprobs": 0}
    async with site.client() as client:
        create: Any = client.completions.create
        for skips, text in ((True, "One two."), (False, "One<|im_start|> two.")):
            extra = {"skip_special_tokens": skips, "return_token_ids": True, "return_tokens_as_token_ids": True}
            whole = (await create(**ask_raw, extra_body=extra)).choices[0]
            parts = [chunk.choices[0] async for chunk in await create(**ask_raw, extra_body=extra, stream=True)]
            assert whole.text == "".join(part.text for part in parts) == text
            assert whole.token_ids[: len(ids)] == ids
            assert whole.logprobs.tokens == [f"token_id:{token}" for token in whole.token_ids]
        chat: Any = await client.chat.completions.create(
            model="policy", messages=ASK, logprobs=True, extra_body={"return_tokens_as_token_ids": True}
        )
    assert [row.token for row in chat.choices[0].logprobs.content][: len(ids)] == [f"token_id:{i}" for i in ids]
    site.check_exact(await site.close())
