"""Data sets of papers in the shapes they are published in, tiny and made here, become the examples' tasks."""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import ConfigError
from examples.math import tasks as math_tasks
from examples.rag import corpus as rag_corpus
from examples.sql import data as sql_data
from examples.sql.grading import score


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, rows: list[Any]) -> None:
    """As JSON lines, a JSON array, or Parquet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["it", *map(str, arguments)])
    module.main()


def test_spiders_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tmp_path / "spider"
    (given / "database" / "pets").mkdir(parents=True)
    with sqlite3.connect(given / "database" / "pets" / "pets.sqlite") as database:
        database.executescript("CREATE TABLE pet (name TEXT, age INT); INSERT INTO pet VALUES ('Rex', 3), ('Ada', 7);")
    row = {"db_id": "pets", "question": "Who is oldest?", "query": "SELECT name FROM pet ORDER BY age DESC LIMIT 1"}
    write(given / "train_spider.json", [{**row, "query_toks": ["SELECT"], "sql": {}}])
    write(given / "dev.json", [row, {**row, "db_id": "gone"}])
    run(sql_data, monkeypatch, tmp_path / "out", "--data", given)
    (train,), (val,) = lines(tmp_path / "out" / "train.jsonl"), lines(tmp_path / "out" / "val.jsonl")
    assert train == val
    assert score(Path(train["database"]), "SELECT name FROM pet WHERE age = 7", train["query"]) == 1.0
    with pytest.raises(ConfigError, match="no folder 'database'"):
        run(sql_data, monkeypatch, tmp_path / "out", "--data", tmp_path)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_gsm8k(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": "How many?", "answer": "She has <<2*600=1200>>1,200 left.\n#### 1,200"}]
    write(tmp_path / "gsm8k" / f"train-00000-of-00001.{suffix}", rows)
    write(tmp_path / "gsm8k" / f"test-00000-of-00001.{suffix}", rows)
    run(math_tasks, monkeypatch, tmp_path / "out", "--data", tmp_path / "gsm8k")
    assert lines(tmp_path / "out" / "train.jsonl") == [{"question": "How many?", "answer": 1200}]
    assert lines(tmp_path / "out" / "test.jsonl") == lines(tmp_path / "out" / "train.jsonl")


def test_calc_x(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"id": "x__1", "question": "?", "chain": "<gadget id='calculator'>3/4</gadget>", "source": "made"}
    write(tmp_path / "train.parquet", [{**row, "result": text} for text in ("3/4", "1_000", "-2.5", "option b")])
    run(math_tasks, monkeypatch, tmp_path / "out", "--data", tmp_path / "train.parquet")
    assert [task["answer"] for task in lines(tmp_path / "out" / "train.jsonl")] == [0.75, 1000, -2.5]


PARAGRAPHS = [{"idx": 0, "title": "Oslo", "paragraph_text": "Oslo lies at the Alna.", "is_supporting": True}]
MUSIQUE = {
    "id": "2hop__1_2",
    "paragraphs": PARAGRAPHS,
    "question": "Which river?",
    "answer": "Alna",
    "answerable": True,
}


@pytest.mark.parametrize("dump", [None, "psgs_w100.tsv", "wiki-18.jsonl", "plain.jsonl"])
def test_musique_over_its_paragraphs_or_wikipedia(
    dump: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [MUSIQUE, {**MUSIQUE, "id": "2", "answerable": False}]
    write(tmp_path / "musique" / "musique_ans_v1.0_train.jsonl", rows)
    write(tmp_path / "musique" / "musique_ans_v1.0_dev.jsonl", [MUSIQUE])
    (tmp_path / "psgs_w100.tsv").write_text('id\ttext\ttitle\n1\t"A ""river"" runs."\tAlna\n')
    write(tmp_path / "wiki-18.jsonl", [{"id": "1", "contents": '"Alna"\nA "river" runs.'}])
    write(tmp_path / "plain.jsonl", [{"title": "Alna", "text": 'A "river" runs.'}])
    over = ["--wikipedia", tmp_path / dump] if dump else []
    run(rag_corpus, monkeypatch, tmp_path / "out", "--data", tmp_path / "musique", *over)
    (train,), (val,) = lines(tmp_path / "out" / "train.jsonl"), lines(tmp_path / "out" / "val.jsonl")
    assert (train["question"], train["answer"], train) == ("Which river?", "Alna", val)
    own = {"title": "Oslo", "text": "Oslo lies at the Alna."}
    assert lines(Path(train["corpus"])) == [{"title": "Alna", "text": 'A "river" runs.'} if dump else own]


def test_another_data_set_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "train.jsonl", [{"question": "?", "gold": 1}])
    with pytest.raises(ConfigError, match="'answer'"):
        run(math_tasks, monkeypatch, tmp_path / "out", "--data", tmp_path / "train.jsonl")
    write(tmp_path / "wiki.jsonl", [{"body": "x"}])
    write(tmp_path / "musique.jsonl", [MUSIQUE])
    given = ("--data", tmp_path / "musique.jsonl", "--wikipedia", tmp_path / "wiki.jsonl")
    with pytest.raises(ConfigError, match="line 1 has neither"):
        run(rag_corpus, monkeypatch, tmp_path / "out", *given)
