"""Tasks in files: each kind is read, and each mistake is answered with what mends it."""

from __future__ import annotations

import csv
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentlightning.errors import ConfigError
from agentlightning.trainer import tasks
from agentlightning.trainer.checks import as_tasks
from agentlightning.trainer.tasks import load_tasks


@pytest.mark.parametrize(
    ("name", "text", "tasks"),
    [
        ("a.jsonl", '{"q": 1}\n\n"two"\n', [{"q": 1}, "two"]),
        ("a.jsonl", '\ufeff{"q": "ü"}\n', [{"q": "ü"}]),
        ("a.jsonl", '{"q": "one\u2028two\x85three"}\n3\n', [{"q": "one\u2028two\x85three"}, 3]),
        ("a.json", '[{"q": 1},\n 2]', [{"q": 1}, 2]),
        ("a.csv", 'q,a\n"1, 2",3\n', [{"q": "1, 2", "a": "3"}]),
    ],
)
def test_files_that_are_read(tmp_path: Path, name: str, text: str, tasks: list[Any]) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert load_tasks(tmp_path / name) == tasks
    assert as_tasks("training", str(tmp_path / name)) == tasks


def test_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"q": ["a", "b"], "n": [1, 2]}), tmp_path / "a.parquet")
    assert load_tasks(tmp_path / "a.parquet") == [{"q": "a", "n": 1}, {"q": "b", "n": 2}]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '[{"q": 1}, {"q": 2}]', "Rename it to a.json: its 2 entries are the tasks"),
        ("a.jsonl", '[\n  {"q": 1}\n]', "let its name end in .json"),
        ("a.jsonl", '{"q": 1}\n{"q": 2\n', "line 2 is not JSON"),
        ("a.jsonl", "\n", "holds no tasks"),
        ("a.json", '{"q": 1}\n{"q": 2}\n', "its name must end in .jsonl"),
        ("a.json", '{"data": [1, 2]}', "Its part 'data' is one"),
        ("a.json", "[]", "holds no tasks"),
        ("a.csv", "q,a\n1,2,3\n", "row 2 has not as many fields"),
        ("a.txt", "hello", "ends in none of .jsonl"),
    ],
)
def test_files_that_are_not(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_tasks(tmp_path / name)
    assert words in str(caught.value)


def test_a_file_that_is_no_text_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        load_tasks(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match="There is no file"):
        load_tasks(tmp_path / "none.jsonl")


@pytest.mark.parametrize("text", ["\\ud800", "a\\u0000b", "\\udc00\\ud800"])
@pytest.mark.parametrize("shape", ['"{}"', '{{"q": ["{}"]}}', '{{"{}": 1}}'])
def test_texts_that_no_store_holds_are_refused_with_their_line(tmp_path: Path, text: str, shape: str) -> None:
    task = shape.format(text)
    (tmp_path / "a.jsonl").write_text(f'{{"q": 1}}\n\n{task}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="line 3"):
        load_tasks(tmp_path / "a.jsonl")
    (tmp_path / "a.json").write_text(f"[1, {task}]", encoding="utf-8")
    with pytest.raises(ConfigError, match="task 2"):
        load_tasks(tmp_path / "a.json")
    (tmp_path / "a.jsonl").write_text('"\\ud83d\\ude00"\n', encoding="utf-8")
    assert load_tasks(tmp_path / "a.jsonl") == ["😀"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 5_000 + "1" + "}" * 5_000])
def test_values_nested_without_end_are_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text + "\n")
    with pytest.raises(ConfigError, match=rf"{name}.* nested too deeply"):
        load_tasks(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "begin", "one", "end"),
    [("wide.jsonl", '{"a":{', '"k%d":1,', '"k0":1}}'), ("wide.csv", "", "k%d,", "k0\n1\n")],
)
def test_a_name_that_stands_twice_among_many_is_found_at_once(
    tmp_path: Path, name: str, begin: str, one: str, end: str
) -> None:
    (tmp_path / name).write_text(begin + "".join(one % n for n in range(30_000, -1, -1)) + end)
    began = time.process_time()
    with pytest.raises(ConfigError, match=r"'k0'|\"k0\""):
        load_tasks(tmp_path / name)
    assert time.process_time() - began < 2


def test_a_long_text_in_csv_is_a_task(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"question,answer\n{'a' * 200_000},1\n")
    assert load_tasks(tmp_path / "t.csv") == [{"question": "a" * 200_000, "answer": "1"}]


def test_a_field_of_csv_that_never_ends_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_FIELD", 100)
    before = csv.field_size_limit()
    (tmp_path / "t.csv").write_text('question,answer\n"' + "a\n" * 200)
    with pytest.raises(ConfigError, match=r"t.csv cannot be read as CSV: field larger .* may not be closed"):
        load_tasks(tmp_path / "t.csv")
    assert csv.field_size_limit() == before, "it is the whole process's"


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet"])
def test_files_that_are_none_or_have_no_end_hold_nobody_up(ending: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"pipe{ending}")
    (tmp_path / f"zero{ending}").symlink_to("/dev/zero")
    with (tmp_path / f"hole{ending}").open("wb") as file:
        file.truncate(1 << 40)
    for name, words in (("pipe", "is a pipe"), ("zero", "is a pipe"), ("hole", "has 1,099,511,627,776 bytes")):
        with pytest.raises(ConfigError, match=words):
            load_tasks(tmp_path / f"{name}{ending}")


def test_rows_of_parquet_that_take_no_place_in_the_file_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"question": pa.nulls(11, pa.int8())}), tmp_path / "t.parquet")
    assert len(load_tasks(tmp_path / "t.parquet")) == 11
    monkeypatch.setattr(tasks, "MOST_TASKS", 10)
    with pytest.raises(ConfigError, match="it has 11 rows, and more than 10 are not read"):
        load_tasks(tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("limit", "column", "words"),
    [
        ("MOST_VALUES", pa.array([[None] * 40] * 5), "it has 200 values, and more than 100 are not read"),
        ("_EXPANDED", pa.array(["x" * 1000] * 5), "its values take more than 100 bytes in memory"),
    ],
)
def test_values_of_parquet_that_take_no_place_in_the_file_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, column: Any, words: str
) -> None:
    pq.write_table(pa.table({"q": column}), tmp_path / "t.parquet")
    assert load_tasks(tmp_path / "t.parquet") == [{"q": value} for value in column.to_pylist()]
    monkeypatch.setattr(tasks, limit, 100)
    monkeypatch.setattr(tasks, "_RATIO", 0)
    with pytest.raises(ConfigError, match=words):
        load_tasks(tmp_path / "t.parquet")


def test_dates_that_python_has_not_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"t": pa.array([2**62], pa.timestamp("us"))}), tmp_path / "t.parquet")
    with pytest.raises(ConfigError, match="out of range"):
        load_tasks(tmp_path / "t.parquet")


def test_blanks_without_end_hold_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[" + " " * 100_000 + "x")
    began = time.process_time()
    with pytest.raises(ConfigError, match="is not JSON"):
        load_tasks(tmp_path / "a.json")
    assert time.process_time() - began < 2


def test_a_file_that_the_disk_does_not_give_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to("/proc/self/mem")  # a regular file that cannot be read
    with pytest.raises(ConfigError, match=r"a\.jsonl cannot be read"):
        load_tasks(tmp_path / "a.jsonl")
