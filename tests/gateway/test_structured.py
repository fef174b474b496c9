"""JSON answers: each dialect's way to ask becomes a grammar of the whole response, or a refusal that names a field."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel
from transformers import AutoTokenizer

from agentlightning.models import resolve_model
from agentlightning.rendering import RenderersRendering
from tests.gateway.conftest import CALC, Site, call_text


class Answer(BaseModel):
    verdict: Literal["yes", "no"]
    points: int


ASK: Any = [{"role": "user", "content": "Is 2 + 3 = 5? Answer in JSON."}]
SCHEMA = {**Answer.model_json_schema(), "additionalProperties": False}
GOOD = '{"verdict": "yes", "points": 3}'
BAD = ('{"verdict": "maybe", "points": 3}', '{"verdict": "yes"}', "yes", '{"verdict": "yes", "points": 3}.')


@pytest.fixture(scope="module")
def reader() -> tuple[Any, LLTokenizer]:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("calc"))
    backend = tokenizer.backend_tokenizer.to_str()
    return tokenizer, LLTokenizer(backend, n_vocab=len(tokenizer), eos_token=[tokenizer.eos_token_id])


Reader = tuple[Any, LLTokenizer]


def accepts(reader: Reader, grammar: str | None, text: str) -> bool:
    """Whether a whole response follows the grammar."""
    assert grammar is not None
    tokenizer, vocabulary = reader
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def check(reader: Reader, grammar: str | None) -> None:
    assert accepts(reader, grammar, GOOD)
    assert accepts(reader, grammar, f"<think>\nSo {{it}} is.\n</think>\n\n{GOOD}"), "reasoning is free"
    assert not any(accepts(reader, grammar, text) for text in BAD)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_completions(site: Site, reader: Reader, stream: bool) -> None:
    site.engine.script = lambda _prompt, _params: GOOD
    async with site.client() as client:
        if stream:
            asked = client.chat.completions.stream(model="policy", messages=ASK, response_format=Answer)
            async with asked as events:
                completion = await events.get_final_completion()
        else:
            completion = await client.chat.completions.parse(model="policy", messages=ASK, response_format=Answer)
    assert completion.choices[0].message.parsed == Answer(verdict="yes", points=3)
    check(reader, site.engine.params[0].grammar)


async def test_json_mode(site: Site, reader: Reader) -> None:
    async with site.client() as client:
        await client.chat.completions.create(model="policy", messages=ASK, response_format={"type": "json_object"})
        await client.chat.completions.create(model="policy", messages=ASK, response_format={"type": "text"})
    held, free = site.engine.params
    assert accepts(reader, held.grammar, '{"anything": [1, {"goes": null}]}')
    assert not accepts(reader, held.grammar, "[1]")
    assert free.grammar is None


async def test_responses(site: Site, reader: Reader) -> None:
    site.engine.script = lambda _prompt, _params: GOOD
    async with site.client() as client:
        response = await client.responses.parse(model="policy", input=ASK, text_format=Answer)
    assert response.output_parsed == Answer(verdict="yes", points=3)
    check(reader, site.engine.params[0].grammar)


async def test_anthropic_messages(site: Site, reader: Reader) -> None:
    site.engine.script = lambda _prompt, _params: GOOD
    base_url = site.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=site.key, max_retries=0) as client:
        create: Any = client.messages.create
        wanted = {"format": {"type": "json_schema", "schema": SCHEMA}}
        answer = await create(model="policy", max_tokens=100, messages=ASK, output_config=wanted)
    assert Answer.model_validate_json(answer.content[0].text).points == 3
    check(reader, site.engine.params[0].grammar)


async def test_with_tools_the_model_may_call_one_instead(site: Site, reader: Reader) -> None:
    async with site.client() as client:
        parse: Any = client.chat.completions.create
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
        for choice in ("auto", "none", "required"):
            await parse(model="policy", messages=ASK, tools=[CALC], tool_choice=choice, response_format=wanted)
    auto, none, required = (params.grammar for params in site.engine.params)
    check(reader, auto)
    assert accepts(reader, auto, call_text(2, 3))
    assert accepts(reader, auto, f"<think>\nHm.\n</think>\n\n{call_text(2, 3)}\n{call_text(4, 5)}")
    assert not accepts(reader, auto, call_text(2, 3) + GOOD)
    assert not accepts(reader, auto, call_text(2, 3).replace("calc", "rm")), "only tools that are there"
    assert not accepts(reader, auto, call_text(2, 3).replace("3", '"three"')), "arguments follow the tool's schema"
    assert not accepts(reader, none, call_text(2, 3))
    assert accepts(reader, required, call_text(2, 3)), "a call that is required is no answer"
    assert not accepts(reader, required, GOOD)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object", "properties": {"a": {"type": "colour"}}}, "colour"),
        ({"$ref": "#/$defs/Missing"}, "Missing"),
        ({"type": "string", "format": "haiku"}, "haiku"),
    ],
)
async def test_a_schema_that_cannot_be_enforced_is_refused(site: Site, schema: dict[str, Any], named: str) -> None:
    async with site.client() as client:
        create: Any = client.chat.completions.create
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match=named) as caught:
            await create(model="policy", messages=ASK, response_format=wanted)
    assert caught.value.param == "response_format"
    assert not site.engine.params


async def test_unions_of_models_work(site: Site, reader: Reader) -> None:
    """pydantic writes discriminated unions as oneOf."""
    one_of = {"oneOf": [{"type": "integer"}, {"type": "boolean"}]}
    schema = {"type": "object", "properties": {"x": one_of}, "required": ["x"], "additionalProperties": False}
    async with site.client() as client:
        create: Any = client.chat.completions.create
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        await create(model="policy", messages=ASK, response_format=wanted)
    assert accepts(reader, site.engine.params[0].grammar, '{"x": true}')


async def test_a_format_whose_answers_begin_nobody_knows_where_is_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RenderersRendering, "grammar", lambda *_args, **_fields: None)
    async with site.client() as client:
        with pytest.raises(openai.BadRequestError, match="renderer"):
            await client.chat.completions.create(model="policy", messages=ASK, response_format={"type": "json_object"})


async def test_objects_are_closed_unless_they_say_otherwise(site: Site, reader: Reader) -> None:
    name = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    schemas: list[Any] = [name, {**name, "additionalProperties": True}, {"allOf": [name]}]
    async with site.client() as client:
        create: Any = client.chat.completions.create
        for schema in schemas:
            wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            await create(model="policy", messages=ASK, response_format=wanted)
    more = [accepts(reader, p.grammar, '{"name": "A", "more": 1}') for p in site.engine.params]
    assert more == [False, True, True]
    assert all(accepts(reader, p.grammar, '{"name": "A"}') for p in site.engine.params)
