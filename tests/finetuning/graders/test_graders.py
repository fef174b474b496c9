"""Graders that need neither a sandbox nor a model, and the two routes that try graders."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from openai.types.fine_tuning.alpha import GraderRunResponse

from agentlightning.errors import GraderRefused
from agentlightning.finetuning.graders import (
    Errors,
    Grade,
    GraderSettings,
    Sample,
    grade,
    parse_grader,
    run_grader,
    validate_grader,
)

OUTPUT = "{{ sample.output_text }}"


def check(operation: str = "eq", reference: str = "{{ item.answer }}", **more: Any) -> dict[str, Any]:
    texts = {"input": OUTPUT, "reference": reference}
    return {"type": "string_check", "name": "n", "operation": operation, **texts, **more}


def similar(metric: str, reference: str = "{{ item.answer }}") -> dict[str, Any]:
    texts = {"input": OUTPUT, "reference": reference}
    return {"type": "text_similarity", "name": "n", "evaluation_metric": metric, **texts}


def multi(formula: str, **graders: Any) -> dict[str, Any]:
    return {"type": "multi", "graders": graders, "calculate_output": formula}


async def graded(grader: Mapping[str, Any], text: str, **item: Any) -> Grade:
    return await grade(parse_grader(grader), item, Sample.of_text(text))


@pytest.mark.parametrize(
    ("operation", "text", "answer", "expected"),
    [
        ("eq", "Paris", "Paris", 1.0),
        ("eq", "paris", "Paris", 0.0),
        ("ne", "paris", "Paris", 1.0),
        ("neq", "Paris", "Paris", 0.0),
        ("like", "It is Paris.", "Paris", 1.0),
        ("like", "Paris", "It is Paris.", 0.0),
        ("like", "It is paris.", "Paris", 0.0),
        ("ilike", "It is PARIS.", "Paris", 1.0),
    ],
)
async def test_string_checks(operation: str, text: str, answer: str, expected: float) -> None:
    assert (await graded(check(operation), text, answer=answer)).reward == expected


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("fuzzy_match", 0.93023),  # each is what the library itself says of the two
        ("bleu", 0.37992),
        ("gleu", 0.5),  # 9 of the 18 n-grams up to 4
        ("meteor", 0.80667),
        ("rouge_1", 10 / 12),  # five of six words
        ("rouge_2", 6 / 10),  # three of five pairs
        ("rouge_3", 2 / 8),
        ("rouge_4", 0.0),
        ("rouge_5", 0.0),
        ("rouge_l", 10 / 12),
    ],
)
async def test_text_similarity(metric: str, expected: float) -> None:
    found = await graded(similar(metric), "the cat sat on the mat", answer="the cat is on the mat")
    assert found.reward == pytest.approx(expected, abs=1e-5)
    for text, answer in (("", ""), ("x", ""), ("", "x"), ("\0\ud800", "ß")):
        found = await graded(similar(metric), text, answer=answer)
        assert found.reward is not None
        assert 0.0 <= found.reward <= 1.0


async def test_texts_that_would_take_minutes_are_not_compared() -> None:
    for metric, done in (("rouge_l", False), ("meteor", False), ("fuzzy_match", False), ("rouge_1", True)):
        found = await graded(similar(metric), "a b " * 50_000, answer="a b " * 50_000)
        assert (found.reward is not None, found.errors.flags) == (done, [] if done else ["other_error"])


async def test_a_template_that_copies_a_text_without_end_is_a_failure() -> None:
    many = {**check(), "input": "{{ item.answer }}" * 10_000}
    tracemalloc.start()
    found = await graded(many, "a", answer="x" * 100_000)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found.reward, found.errors.flags) == (None, ["other_error"])
    assert "more than 4,194,304 characters" in (found.why or "")
    assert most < 2**24


async def test_rouge_l_needs_no_table_of_all_pairs_of_words() -> None:
    tracemalloc.start()
    found = await graded(similar("rouge_l"), "a b " * 2_000, answer="b a c " * 2_000)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.reward == pytest.approx(2 * 3_999 / (4_000 + 6_000))
    assert most < 2**24


async def test_cosine_compares_embeddings_and_is_refused_without_a_model() -> None:
    class Vectors:
        async def chat(self, model: str, messages: Any, sampling: Any) -> dict[str, Any]:
            raise AssertionError("no model is asked to write")

        async def embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
            assert model == "small"
            return [[float(len(text)), 1.0] for text in texts]

    with pytest.raises(GraderRefused) as refused:
        parse_grader(similar("cosine"))
    assert refused.value.param == "grader.evaluation_metric"
    grader = parse_grader(similar("cosine"), settings=GraderSettings(embeddings_model="small"))
    found = await grade(grader, {"answer": "abc"}, Sample.of_text("x"), Vectors())
    assert found.reward == pytest.approx(4 / (2**0.5 * 10**0.5))
    assert (await grade(grader, {"answer": "abc"}, Sample.of_text("x"))).errors.flags == ["model_grader_server_error"]


async def test_a_multi_has_the_value_of_its_formula_and_the_rewards_of_its_parts() -> None:
    grader = multi("0.75 * same + 0.25 * near ^ 2", same=check(), near=similar("rouge_1"))
    found = await graded(grader, "a b", answer="a c")
    assert found.sub_rewards == {"same": 0.0, "near": 0.5}
    assert found.reward == pytest.approx(0.0625)
    assert found.name == "multi"
    one_alone = {**multi("n"), "graders": check()}  # as the client's types have it
    assert (await graded(one_alone, "x", answer="x")).sub_rewards == {"n": 1.0}


@pytest.mark.parametrize(
    ("grader", "text", "reward", "flags"),
    [
        (check(reference="{{ item.nothing }}"), "x", None, ["invalid_variable_error"]),
        (check(reference="{{ sample.output_json.x }}"), "no JSON", 0.0, ["sample_parse_error"]),
        (check(reference="{{ sample.output_json.x }}"), '{"y": 1}', None, ["invalid_variable_error"]),
        (multi("1 / a", a=check()), "x", None, ["formula_parse_error"]),
        (multi("exp(1000 + a)", a=check()), "x", None, ["formula_parse_error"]),
        (multi("1e300 + a", a=check()), "x", None, ["unresponsive_reward_error"]),
        (multi("a", a=check(reference="{{ item.nothing }}")), "x", None, ["invalid_variable_error"]),
        (multi("b", a=check(reference="{{ item.no }}"), b=check("ne")), "x", 1.0, ["invalid_variable_error"]),
    ],
)
async def test_a_failure_is_a_flag_and_no_reward(
    grader: dict[str, Any], text: str, reward: float | None, flags: list[str]
) -> None:
    found = await graded(grader, text, answer="1")
    assert (found.reward, found.errors.flags) == (reward, flags)
    assert reward is not None or found.why


@pytest.mark.parametrize(
    ("grader", "param"),
    [
        ({}, "grader.type"),
        ({"type": "endpoint"}, "grader.type"),
        ([], "grader"),
        (check("contains"), "grader.operation"),
        (check(reference=3), "grader.reference"),  # pyright: ignore[reportArgumentType]
        (check(reference="{{ x }}"), "grader.reference"),
        (check(weight=2), "grader.weight"),
        (similar("cosine"), "grader.evaluation_metric"),
        (similar("rouge_6"), "grader.evaluation_metric"),
        (multi("a"), "grader.graders"),
        (multi("a + b", a=check()), "grader.calculate_output"),
        (multi("min", min=check()), "grader.graders.min"),
        (multi("a0", **{f"a{number}": check() for number in range(101)}), "grader.graders"),
        ({**multi("1"), "graders": {"a-b": check()}}, "grader.graders.a-b"),
        (multi("a", a=check(reference="{{ x }}")), "grader.graders.a.reference"),
        (multi("a", a=multi("b", b=check())), "grader.graders.a.type"),
        ({**multi("a", a=check()), "weights": []}, "grader.weights"),
    ],
)
def test_what_is_wrong_is_refused_by_its_path(grader: Any, param: str) -> None:
    with pytest.raises(GraderRefused) as refused:
        parse_grader(grader)
    assert refused.value.param == param
    with pytest.raises(GraderRefused) as refused:
        validate_grader({"grader": grader} if grader else {"grader": grader, "x": 1})
    assert refused.value.param == (param if grader else "x")


def test_what_is_valid_is_echoed() -> None:
    for grader in (check(), {**similar("bleu"), "pass_threshold": 0.5}, multi("a", a=check())):
        assert validate_grader({"grader": grader}) == {"grader": grader}


@pytest.mark.parametrize("grader", [check(), multi("a", a=check()), check(reference="{{ item.nothing }}")])
async def test_an_answer_has_every_field_that_the_client_reads(grader: dict[str, Any]) -> None:
    answer = await run_grader({"grader": grader, "model_sample": "x", "item": {"answer": "x"}})
    parsed = GraderRunResponse.model_validate(answer, strict=True)
    assert not parsed.model_extra
    assert parsed.metadata.errors.to_dict().keys() == Errors().as_dict().keys()
    assert parsed.reward in (0.0, 1.0)
    for body in ({"grader": grader}, {"grader": grader, "model_sample": "x", "item": "x"}):
        with pytest.raises(GraderRefused):
            await run_grader(body)
