"""The retrieval example without its framework: what is found, what an answer earns, that questions have answers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from agentlightning.cli.configuration import make_algorithm
from examples.calc.tokenizer import make_tokenizer
from examples.rag import corpus, demonstrations, recipe
from examples.rag.bm25 import Index, Library
from examples.rag.corpus import SIZES, make_documents, make_questions, make_world, write_data
from examples.rag.demonstrations import MIXED, SKILL, call, demonstrate, spoiled, tagged, world
from examples.rag.prompts import MAX_TURNS
from examples.rag.reward import earned, f1, score

ROOT = Path(__file__).parents[2]


def test_the_document_with_the_rarest_shared_words_is_best() -> None:
    index = Index(["Oslo lies on the river Alna.", "Arvo Works makes lamps.", "Belta Works makes kites.", "The Alna."])
    assert index.best("who makes kites?", 2) == [2, 1]
    assert index.best("Oslo", 3) == [0]
    assert index.best("nothing of this", 3) == []
    assert index.best("", 3) == []


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>Oslo</answer>", 1.0),
        ("It is <answer>oslo.</answer>", 1.0),
        ("<answer>in Oslo</answer>", 0.9 * 2 / 3 + 0.1),
        ("<answer>Turin</answer>", 0.1),
        ("Oslo", 0.0),
        ("<answer>Turin</answer> or <answer>Oslo</answer>", 0.0),
        ("<answer></answer>", 0.1),
    ],
)
def test_an_answer_is_worth_its_words_and_its_form(text: str, reward: float) -> None:
    assert score(text, "Oslo") == pytest.approx(reward)


def test_words_count_as_often_as_they_occur() -> None:
    assert f1("a a b", "a b b") == pytest.approx(2 / 3)
    assert f1("", "a") == 0.0


def test_every_question_can_be_answered_by_searching_for_what_was_found() -> None:
    made = make_world()
    library = Library(make_documents(made))
    for question in make_questions(made):
        for name, following in zip(question.names, question.names[1:], strict=False):
            assert following in library.search(name).partition("\n")[0], question


def test_what_an_answer_earns_is_told_with_how_it_came_about() -> None:
    right = {"score": pytest.approx(1.0), "right": 1.0, "tagged": 1.0, "searches": 2.0}
    assert earned("<answer>Oslo</answer>", "Oslo", 2) == right
    assert earned("Oslo", "Oslo", 2) == {"score": 0.0, "right": 0.0, "tagged": 0.0, "searches": 2.0}


def test_a_demonstration_is_of_a_world_that_is_not_the_tasks() -> None:
    tasks = {row["question"]: row["answer"] for rows in corpus.make_tasks().values() for row in rows}
    same = [q.names[-1] == tasks[q.text] for n in range(3) for q in world(n)[0] if q.text in tasks]
    assert len(same) > 900
    assert sum(same) / len(same) < 0.15, "one of twelve towns or rivers, so some by chance"


def test_demonstrations_of_skill_are_mostly_right_and_mixed_ones_mostly_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstrations, "WORLDS", 1)
    answers = {question.text: question.names[-1] for question in world(0)[0]}
    shares = {}
    for name, weights in (("skill", SKILL), ("mixed", MIXED)):
        rng, rewards = random.Random(0), []
        for _ in range(300):
            shown = demonstrate(rng, weights)
            assert len(shown.turns) == len(shown.results) + 1 <= MAX_TURNS
            rewards.append(score(shown.turns[-1], answers[shown.messages[-1]["content"]]))
        shares[name] = sum(rewards) / len(rewards)
    assert shares["skill"] > 0.8
    assert 0.1 < shares["mixed"] < 0.4


def test_a_spoiled_query_is_another_one() -> None:
    rng = random.Random(0)
    for question in world(0)[0]:
        for known in range(len(question.names) - 1):
            queries = spoiled(question, known, rng)
            assert queries
            assert question.names[known] not in queries


def test_every_name_is_one_token() -> None:
    """So that the small model copies it in one step wherever it stands."""
    rng = random.Random(0)
    shown = [demonstrate(rng, MIXED) for _ in range(400)]
    texts = [t for d in shown for t in (*(m["content"] for m in d.messages), *d.turns, *d.results)]
    made = make_tokenizer(texts, 1024)
    firms, people = (corpus.FIRMS, corpus.PARTNERS), (corpus.FIRST, corpus.LAST)
    for name in (*firms[0], *firms[1], *people[0], *people[1], *corpus.TOWNS, *corpus.RIVERS):
        assert len(made.encode(f" {name}", add_special_tokens=False)) == 1, name
    for name in (*corpus.TOWNS, *corpus.RIVERS):
        assert len(made.encode(tagged(name), add_special_tokens=False)) == 5, name
    assert len(made.encode(call("Arvo & Mills"), add_special_tokens=False)) < 24


def test_no_question_is_in_two_parts(tmp_path: Path) -> None:
    tasks = write_data(tmp_path)
    assert {part: len(rows) for part, rows in tasks.items()} == SIZES
    asked = [row["question"] for rows in tasks.values() for row in rows]
    assert len(set(asked)) == len(asked)
    assert write_data(tmp_path) == tasks, "the same each time"
    lines = [json.loads(line) for line in (tmp_path / "val.jsonl").read_text().splitlines()]
    assert lines == tasks["val"]
    assert Path(lines[0]["corpus"]).is_file()


def test_the_files_of_settings_are_settings() -> None:
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load((ROOT / "examples" / "rag" / "config.yaml").read_text()) == recipe.SETTINGS
    assert make_algorithm(None, None, ROOT / "examples" / "rag" / "config.gpu.yaml", []).model == "Qwen/Qwen3-1.7B"
