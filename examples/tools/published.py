"""Reads the data sets that papers train on, as they are published, into the tasks of the examples.

    spider      the folder of Spider: train_spider.json (or .parquet), dev.json, database/ID/ID.sqlite
    calc_x      a file or folder of Calc-X: Parquet or JSON lines with question and result
    gsm8k       a file or folder of GSM8K: Parquet or JSON lines with question and answer, the number behind ####
    musique     a file or folder of MuSiQue: musique_ans_…_train.jsonl, …_dev.jsonl, with their paragraphs as the corpus
    wikipedia   a dump in passages as corpus: DPR's .tsv (id, text, title), JSON lines of contents, or title and text

What cannot be a task is left out, and the number of tasks says how much that was. None of the data comes with this
package.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from agentlightning.errors import ConfigError
from agentlightning.trainer.tasks import load_tasks

Task = dict[str, Any]
Parts = dict[str, list[Task]]
_OF_PART = {"train": ("train",), "val": ("val", "dev"), "test": ("test",)}
"""What names of files have in them."""
_SUFFIXES = (".parquet", ".jsonl", ".json")


def spider(folder: Path) -> Parts:
    """Tasks for `examples/sql`: the path of the database, the question, and the query. Raises ConfigError."""
    databases = folder / "database"
    if not databases.is_dir():
        raise ConfigError(f"{folder} has no folder 'database': give the folder that Spider's archive unpacks to.")
    return _parts(folder, lambda row: _of_spider(row, databases))


def _of_spider(row: Task, databases: Path) -> Task | None:
    database = databases / str(row["db_id"]) / f"{row['db_id']}.sqlite"
    if not database.is_file():
        return None
    return {"database": str(database.resolve()), "question": row["question"], "query": row["query"]}


def calc_x(path: Path) -> Parts:
    """Tasks for `examples/math` from Calc-X, those whose result is one number. Raises ConfigError."""
    return _parts(path, lambda row: _with_number(row, str(row["result"])))


def gsm8k(path: Path) -> Parts:
    """Tasks for `examples/math` from GSM8K. Raises ConfigError."""
    return _parts(path, lambda row: _with_number(row, str(row["answer"]).rpartition("####")[2]))


def math(path: Path) -> Parts:
    """Calc-X or GSM8K, told by the first row's fields. Raises ConfigError."""
    row = next(iter(load_tasks(next(iter(_files(path).values()))[0])))
    return (calc_x if "result" in row else gsm8k)(path)


def _with_number(row: Task, text: str) -> Task | None:
    plain = re.sub(r"[,_$%\s]", "", text)
    try:
        number = float(Fraction(plain))
    except (ValueError, ZeroDivisionError):
        return None
    return {"question": row["question"], "answer": int(number) if number.is_integer() else number}


def musique(path: Path, corpus: Path) -> tuple[Parts, Iterator[dict[str, str]]]:
    """Tasks for `examples/rag` that are answered from `corpus`, and the documents of their paragraphs, each once.

    Raises ConfigError.
    """
    parts = _parts(path, lambda row: _of_musique(row, corpus))
    return parts, _paragraphs(row for files in _files(path).values() for file in files for row in load_tasks(file))


def _of_musique(row: Task, corpus: Path) -> Task | None:
    if not row.get("answerable", True):
        return None
    return {"corpus": str(corpus.resolve()), "question": row["question"], "answer": row["answer"]}


def _paragraphs(rows: Iterable[Task]) -> Iterator[dict[str, str]]:
    seen: set[tuple[str, str]] = set()
    for row in rows:
        for paragraph in row.get("paragraphs", ()):
            title, text = paragraph["title"], paragraph["paragraph_text"]
            if (title, text) not in seen:
                seen.add((title, text))
                yield {"title": title, "text": text}


def wikipedia(file: Path) -> Iterator[dict[str, str]]:
    """The passages of a dump, one at a time: it may be larger than the memory. Raises ConfigError for another form."""
    with file.open(encoding="utf-8", newline="") as lines:
        if file.suffix == ".tsv":
            csv.field_size_limit(sys.maxsize)
            for row in csv.DictReader(lines, delimiter="\t"):
                yield {"title": row["title"], "text": row["text"]}
            return
        for number, line in enumerate(lines, 1):
            row = json.loads(line)
            if "contents" in row:  # the title in quotes on the first line, as Search-R1's corpus has it
                title, _, text = row["contents"].partition("\n")
                yield {"title": title.strip('"'), "text": text}
            elif {"title", "text"} <= row.keys():
                yield {"title": row["title"], "text": row["text"]}
            else:
                raise ConfigError(f"{file}, line {number} has neither contents nor title and text.")


def _parts(path: Path, as_task: Callable[[Task], Task | None]) -> Parts:
    found: Parts = {}
    for part, files in _files(path).items():
        try:
            tasks = [as_task(row) for file in files for row in load_tasks(file)]
        except KeyError as error:
            raise ConfigError(f"{files[0]} has no field {error} in a row: it is another data set's.") from None
        found[part] = [task for task in tasks if task is not None]
    return found


def _files(path: Path) -> dict[str, list[Path]]:
    """The files of each part. One file alone is training's, unless its name says otherwise."""
    if path.is_file():
        named = next((part for part, words in _OF_PART.items() if any(w in path.stem for w in words)), "train")
        return {named: [path]}
    there = sorted(p for p in path.glob("*") if p.suffix in _SUFFIXES)
    parts = {part: [p for p in there if any(w in p.stem for w in words)] for part, words in _OF_PART.items()}
    if not any(parts.values()):
        raise ConfigError(f"{path} holds no file whose name says train, dev, val or test and ends in {_SUFFIXES}.")
    return {part: files for part, files in parts.items() if files}
