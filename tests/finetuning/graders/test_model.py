"""Graders that ask a model: what the model is sent, and what becomes of its answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from openai.types.fine_tuning.alpha import GraderRunResponse

from agentlightning.errors import GraderRefused, JudgeError
from agentlightning.finetuning.graders import GraderSettings, HttpModels, Sample, grade, parse_grader, run_grader

ASK = [{"role": "user", "content": "Score {{ sample.output_text }} against {{ item.answer }}."}]


def scoring(**more: Any) -> dict[str, Any]:
    return {"type": "score_model", "name": "s", "model": "judge", "input": ASK, **more}


def labelling(**more: Any) -> dict[str, Any]:
    labels = {"labels": ["good", "bad", "ugly"], "passing_labels": ["good"]}
    return {"type": "label_model", "name": "l", "model": "judge", "input": ASK, **labels, **more}


class Answers:
    """A model that gives one answer, and keeps what it was asked."""

    def __init__(self, content: Any, finish_reason: str = "stop", **message: Any) -> None:
        self.choice = {"message": {"content": content, **message}, "finish_reason": finish_reason}
        self.asked: list[tuple[str, Sequence[Mapping[str, Any]], Mapping[str, Any]]] = []

    async def chat(
        self, model: str, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]
    ) -> dict[str, Any]:
        self.asked.append((model, messages, sampling))
        usage = {"prompt_tokens": 5, "completion_tokens": 2}
        return {"model": "judge-2026", "choices": [self.choice], "usage": usage}

    async def embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        raise ConnectionError("no embeddings")


async def test_messages_that_copy_a_text_without_end_are_a_failure() -> None:
    models = Answers('{"steps": "…", "result": 4}')
    messages = [{"role": "user", "content": "{{ item.answer }}"}] * 100
    found = await grade(parse_grader(scoring(input=messages)), {"answer": "7" * 100_000}, Sample.of_text("six"), models)
    assert (found.reward, found.errors.flags, models.asked) == (None, ["other_error"], [])


async def test_a_model_is_shown_the_messages_and_the_form_of_its_answer() -> None:
    models = Answers('{"steps": "…", "result": 4}')
    image = {"type": "input_image", "image_url": "{{ item.picture }}", "detail": "low"}
    messages = [
        {"role": "developer", "content": "Be strict with {{ item.answer }}.", "type": "message"},
        {"role": "user", "content": ["Look:", {"type": "input_text", "text": "{{sample.output_text}}"}, image]},
        {"role": "assistant", "content": {"type": "output_text", "text": "Yes?"}},
    ]
    sampling = {"max_completions_tokens": 99, "temperature": 0.5, "seed": None}
    grader = parse_grader(scoring(input=messages, range=[1, 5], sampling_params=sampling))
    found = await grade(grader, {"answer": "7", "picture": "data:x"}, Sample.of_text("six"), models)
    assert (found.reward, found.model) == (4.0, "judge-2026")
    ((model, sent, fields),) = models.asked
    assert (model, fields["max_completion_tokens"], fields["temperature"]) == ("judge", 99, 0.5)
    assert "seed" not in fields
    assert fields["response_format"]["json_schema"]["strict"] is True
    system, user, assistant = sent
    assert system["role"] == "system"
    assert system["content"].startswith("Be strict with 7.")
    assert "from 1 to 5" in system["content"]
    assert [part["type"] for part in user["content"]] == ["text", "text", "image_url"]
    assert user["content"][1]["text"] == "six"
    assert user["content"][2]["image_url"] == {"url": "data:x", "detail": "low"}
    assert assistant == {"role": "assistant", "content": "Yes?"}


@pytest.mark.parametrize(
    ("grader", "models", "reward", "flag"),
    [
        (scoring(), Answers('{"result": 0.25}'), 0.25, None),
        (scoring(), Answers('```json\n{"steps": "", "result": 1}\n```'), 1.0, None),
        (labelling(), Answers('{"result": "good"}'), 1.0, None),
        (labelling(), Answers('{"result": "ugly"}'), 0.0, None),
        (labelling(), Answers('{"result": "nice"}'), None, "model_grader_parse_error"),
        (labelling(), Answers('{"result": ["good"]}'), None, "model_grader_parse_error"),
        (scoring(), Answers('{"result": 7}'), None, "model_grader_parse_error"),
        (scoring(), Answers('{"result": true}'), None, "model_grader_parse_error"),
        (scoring(), Answers('{"result": NaN}'), None, "model_grader_parse_error"),
        (scoring(), Answers("0.5"), None, "model_grader_parse_error"),
        (scoring(), Answers('{"steps": "and so', "length"), None, "model_grader_parse_error"),
        (scoring(), Answers(None), None, "model_grader_parse_error"),
        (scoring(), Answers(None, refusal="I will not."), None, "model_grader_refusal_error"),
        (scoring(), Answers("", "content_filter"), None, "model_grader_refusal_error"),
        (scoring(), None, None, "model_grader_server_error"),
        (scoring(range=[-2, 5], input=[{"role": "user", "content": "{{sample.output_json.a}}"}]), None, -2.0, "x"),
    ],
)
async def test_what_becomes_of_an_answer(
    grader: dict[str, Any], models: Answers | None, reward: float | None, flag: str | None
) -> None:
    if flag == "x":
        models, flag = Answers("unused"), "sample_parse_error"
    found = await grade(parse_grader(grader), {"answer": "1"}, Sample.of_text("x"), models)
    assert (found.reward, found.errors.flags) == (reward, [flag] if flag else [])


async def test_the_tokens_of_each_model_are_counted() -> None:
    graders = {"one": scoring(), "two": labelling(model="other"), "three": scoring()}
    multi = {"type": "multi", "graders": graders, "calculate_output": "one + three"}
    body = {"grader": multi, "model_sample": "x", "item": {"answer": "1"}}
    parsed = GraderRunResponse.model_validate(await run_grader(body, Answers('{"result": 0.5}')), strict=True)
    assert parsed.reward == 1.0  # 0.5 is no label, and the formula asks for the scores only
    assert parsed.metadata.errors.api_model_grader_parse_error
    tokens = parsed.api_model_grader_token_usage_per_model
    assert {model: used["total_tokens"] for model, used in tokens.items()} == {"judge": 14, "other": 7}  # pyright: ignore
    assert parsed.metadata.token_usage == 21


@pytest.mark.parametrize(
    ("grader", "param"),
    [
        (scoring(range=[1, 1]), "grader.range"),
        (scoring(range=[0, "1"]), "grader.range"),
        (scoring(range=3), "grader.range"),
        (scoring(input=[]), "grader.input"),
        (scoring(input="x"), "grader.input"),
        (scoring(input=[{"role": "tool", "content": "x"}]), "grader.input[0].role"),
        (scoring(input=[{"role": "user", "content": [{"type": "input_file"}]}]), "grader.input[0].content.type"),
        (scoring(input=[{"role": "user", "content": "{{ x }}"}]), "grader.input[0].content.text"),
        (scoring(sampling_params={"max_tokens": 5}), "grader.sampling_params.max_tokens"),
        (scoring(model="unknown"), "grader.model"),
        (scoring(labels=["a"]), "grader.labels"),
        (labelling(passing_labels=["nice"]), "grader.passing_labels"),
        (labelling(labels=[]), "grader.labels"),
        (labelling(range=[0, 1]), "grader.range"),
    ],
)
def test_what_is_wrong_is_refused_by_its_path(grader: dict[str, Any], param: str) -> None:
    with pytest.raises(GraderRefused) as refused:
        parse_grader(grader, settings=GraderSettings(models=["judge"]))
    assert refused.value.param == param


Requests = list[dict[str, Any]]


@asynccontextmanager
async def endpoint(status: int = 400) -> AsyncIterator[tuple[HttpModels, Requests]]:
    """An endpoint that knows no schemas: it answers these with the status."""
    seen: Requests = []

    async def chat(request: web.Request) -> web.Response:
        seen.append(body := await request.json())
        if "response_format" in body:
            return web.json_response({"error": {"message": "response_format is not supported"}}, status=status)
        message = {"content": json.dumps({"result": 1})}
        return web.json_response({"choices": [{"message": message}], "model": body["model"]})

    async def embeddings(request: web.Request) -> web.Response:
        texts = (await request.json())["input"]
        return web.json_response({"data": [{"embedding": [1.0, len(text)]} for text in texts]})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", chat), web.post("/v1/embeddings", embeddings)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    models = HttpModels(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "key", seconds=5)
    try:
        yield models, seen
    finally:
        await models.close()
        await runner.cleanup()


async def test_an_endpoint_without_schemas_is_asked_without_one() -> None:
    async with endpoint() as (models, seen):
        for _ in range(2):
            found = await grade(parse_grader(scoring()), {"answer": "1"}, Sample.of_text("x"), models)
            assert found.reward == 1.0
        assert ["response_format" in body for body in seen] == [True, False, False]
        assert seen[0].keys() == {"model", "messages", "response_format"}
        with pytest.raises(JudgeError):
            await models.chat_exactly("judge", [], {"response_format": {"type": "json_object"}})
        assert await models.embed("small", ["a", "bcd"]) == [[1.0, 1], [1.0, 3]]


async def test_cosine_asks_an_endpoint_of_the_owners() -> None:
    similar = {"type": "text_similarity", "evaluation_metric": "cosine", "input": "{{sample.output_text}}"}
    async with endpoint() as (models, _):
        settings = GraderSettings(embeddings_model="small", embeddings_url=models.base_url)
        grader = parse_grader({**similar, "reference": "abcd"}, settings=settings)
        found = await grade(grader, {}, Sample.of_text("x"))
        nobody = GraderSettings(embeddings_model="small", embeddings_url="http://127.0.0.1:9/v1")
        failed = await grade(parse_grader({**similar, "reference": "a"}, settings=nobody), {}, Sample.of_text("x"))
    assert found.reward == pytest.approx(5 / (2**0.5 * 17**0.5)), found.why
    assert failed.errors.flags == ["model_grader_server_error"]


async def test_an_endpoint_that_fails_is_a_flag_with_its_words() -> None:
    async with endpoint(403) as (models, _):
        found = await grade(parse_grader(scoring()), {"answer": "1"}, Sample.of_text("x"), models)
    assert found.errors.flags == ["model_grader_server_error"]
    assert "response_format is not supported" in (found.errors.model_grader_server_error_details or "")
