"""`hf:NAME`: rows of a data set as tasks. Folders stand in for the Hub, which is not asked for anything."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentlightning.environments import load_environment
from agentlightning.errors import ConfigError
from agentlightning.trainer import hub
from agentlightning.trainer.tasks import load_tasks


@pytest.fixture(autouse=True)
def datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The package, offline. Not imported while tests are collected: torch's compiler fails in a process that has it."""
    datasets: Any = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return datasets


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set of two splits as JSON lines."""
    made = tmp_path / "questions"
    made.mkdir()
    for split, count in (("train", 3), ("test", 2)):
        rows = [{"question": f"{split} {n}?", "answers": [n, n + 1], "by": {"name": "a"}} for n in range(count)]
        (made / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


@pytest.mark.parametrize(
    ("split", "questions"),
    [
        ("", ["train 0?", "train 1?", "train 2?"]),
        ("@test", ["test 0?", "test 1?"]),
        ("@train[1:]", ["train 1?", "train 2?"]),
        (":default@train[:1]", ["train 0?"]),
    ],
)
def test_rows_are_tasks(folder: Path, split: str, questions: list[str]) -> None:
    found = load_tasks(f"hf:{folder}{split}")
    assert [task["question"] for task in found] == questions
    assert found[-1]["by"] == {"name": "a"}
    assert found[-1]["answers"] == [int(questions[-1][-2]), int(questions[-1][-2]) + 1]


def test_times_are_texts(datasets: Any, tmp_path: Path) -> None:
    when = datetime.datetime(2026, 1, 2, 3, 4)
    rows = {"when": [when], "day": [when.date()], "took": [datetime.timedelta(seconds=90)]}
    (tmp_path / "data").mkdir()
    datasets.Dataset.from_dict(rows).to_parquet(str(tmp_path / "data" / "train.parquet"))
    (task,) = load_tasks(f"hf:{tmp_path / 'data'}")
    assert task == {"when": "2026-01-02T03:04:00", "day": "2026-01-02", "took": "0:01:30"}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("hf:", "names no data set"),
        ("hf:a:b:c", "names no data set"),
        ("hf:{folder}@dev", r"Unknown split .dev.. Should be one of \['train', 'test'\]"),
        ("hf:{folder}:hard", "'hard' not found. Available"),
        ("hf:nobody/nothing", "hf:nobody/nothing cannot be loaded: "),
    ],
)
def test_what_is_wrong_is_named(folder: Path, spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_tasks(spec.format(folder=folder))


def test_bytes_and_pictures_are_no_tasks(datasets: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    datasets.Dataset.from_dict({"q": ["a"], "scan": [b"\x00"]}).to_parquet(str(tmp_path / "data" / "train.parquet"))
    with pytest.raises(ConfigError, match=r"column 'scan' holds binary.*select_columns"):
        load_tasks(f"hf:{tmp_path / 'data'}")


def test_words_of_a_column_are_not_its_type(datasets: Any, tmp_path: Path) -> None:
    """Names of classes and of fields; what is below them counts."""
    kinds = {
        "kind": datasets.ClassLabel(names=["Image", "Video"]),
        "of": {"Audio": datasets.Value("string")},
        "several": [datasets.Value("string")],
    }
    rows = {"kind": [1], "of": [{"Audio": "no"}], "several": [["binary"]]}
    made = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    (tmp_path / "data").mkdir()
    made.to_parquet(str(tmp_path / "data" / "train.parquet"))
    (task,) = load_tasks(f"hf:{tmp_path / 'data'}")
    assert task == {"kind": 1, "of": {"Audio": "no"}, "several": ["binary"]}
    deep = {"seen": [{"at": datasets.Value("int64"), "scan": datasets.Value("binary")}]}
    for kind, held in (({**kinds, **deep}, "'seen' holds binary"), ({"page": datasets.Image()}, "'page' holds")):
        with pytest.raises(ConfigError, match=held):
            hub._refuse_other_columns("hf:x", datasets.Features(kind))


def test_a_folder_of_that_name_is_not_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", ModuleType("datasets"))
    with pytest.raises(ConfigError, match="needs the package 'datasets'"):
        load_tasks("hf:a")


def test_code_beside_a_data_set_is_not_run(folder: Path, tmp_path: Path) -> None:
    (folder / "questions.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for name in (folder, folder / "questions.py"):
        with pytest.raises(ConfigError, match=r"cannot be loaded: .*questions\.py"):
            load_tasks(f"hf:{name}")
    assert not (tmp_path / "ran").exists()


def test_an_older_package_would_run_code(datasets: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "__version__", "3.6.0")
    with pytest.raises(ConfigError, match=r"3\.6\.0 may run code of a data set; install 4\.0"):
        load_tasks(f"hf:{folder}")


def test_without_the_package_its_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs the package .datasets.*\[hf\]"):
        load_tasks(f"hf:{folder}")


def test_as_an_environment_it_lacks_an_agent() -> None:
    with pytest.raises(ConfigError, match="--tasks hf:openai/gsm8k, and an --agent"):
        load_environment("hf:openai/gsm8k")
