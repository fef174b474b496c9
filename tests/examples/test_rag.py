"""The retrieval example without its framework: what is found, what an answer earns, that questions have answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentlightning.cli.configuration import make_algorithm
from examples.rag.bm25 import Index
from examples.rag.corpus import SIZES, make_documents, make_world, write_data
from examples.rag.reward import f1, score

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
    world = make_world()
    documents = make_documents(world)
    index = Index([f"{d['title']} {d['text']}" for d in documents])
    for firm, founder in list(world.founders.items())[:30]:
        town = world.births[founder]
        for query, needed in ((firm, founder), (founder, town), (town, world.rivers[town])):
            found = " ".join(documents[n]["text"] for n in index.best(query, 3))
            assert needed in found, query


def test_no_question_is_in_two_parts(tmp_path: Path) -> None:
    tasks = write_data(tmp_path)
    assert {part: len(rows) for part, rows in tasks.items()} == SIZES
    asked = [row["question"] for rows in tasks.values() for row in rows]
    assert len(set(asked)) == len(asked)
    assert write_data(tmp_path) == tasks, "the same each time"
    lines = [json.loads(line) for line in (tmp_path / "val.jsonl").read_text().splitlines()]
    assert lines == tasks["val"]
    assert Path(lines[0]["corpus"]).is_file()


def test_the_settings_for_a_gpu_are_settings() -> None:
    assert make_algorithm(None, None, ROOT / "examples" / "rag" / "config.gpu.yaml", []).model == "Qwen/Qwen3-1.7B"
