"""The example of math over MCP without its frameworks: its tasks, and its files of settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from agentlightning.cli.configuration import make_algorithm
from examples.calc import recipe as calc
from examples.math import recipe, tasks

ROOT = Path(__file__).parents[2]


def test_no_question_is_in_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tasks", str(tmp_path / "data")])
    tasks.main()
    parts = {part: (tmp_path / "data" / f"{part}.jsonl").read_text().splitlines() for part in tasks.SIZES}
    assert {part: len(lines) for part, lines in parts.items()} == tasks.SIZES
    assert len({json.loads(line)["question"] for lines in parts.values() for line in lines}) == 2300
    assert [json.loads(line) for line in parts["test"]] == recipe.test_tasks()


def test_its_tasks_are_the_calculators() -> None:
    assert (recipe.train_tasks(), recipe.val_tasks()) == (calc.train_tasks(), calc.val_tasks())
    assert recipe.test_tasks() == calc.test_tasks()[:200]


def test_the_files_of_settings_are_settings() -> None:
    yaml = pytest.importorskip("yaml")
    folder = ROOT / "examples" / "math"
    assert yaml.safe_load((folder / "config.yaml").read_text()) == recipe.SETTINGS
    algorithm = make_algorithm(None, None, folder / "config.gpu.yaml", [])
    assert (algorithm.model, algorithm.lora_rank) == ("Qwen/Qwen3-1.7B", 32)
