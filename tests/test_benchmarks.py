"""What the benchmark of algorithms makes of its runs: intervals, a table for the documentation, and no run twice."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def algorithms() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_of_algorithms", ROOT / "benchmarks" / "algorithms.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(after: float) -> list[dict[str, float]]:
    return [
        {"step": 0, "val_reward": 0.4},
        {"step": 1, "reward": 0.5, "rollouts": 96, "val_reward": after},
    ]


def test_the_interval_is_students(algorithms: ModuleType) -> None:
    found = algorithms.summary([rows(after) for after in (0.8, 0.9, 0.7, 0.8, 0.8)])
    assert found["after"] == pytest.approx(0.8)
    assert found["interval"] == pytest.approx((0.8 - 2.78 * 0.0316, 0.8 + 2.78 * 0.0316), abs=1e-3)
    assert algorithms.summary([rows(0.8)])["interval"] is None


def test_a_run_that_is_written_down_is_not_run_again(algorithms: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    asked = {"algorithm": "no such algorithm", "steps": 16, "seed": 3, "task": "calculator"}
    file.write_text(json.dumps({"asked": asked, "rows": rows(0.9)}) + "\n")
    assert algorithms.Results(file).run("no such algorithm", 16, 3, task="calculator") == rows(0.9)


def test_the_table_goes_between_the_marks_of_the_page(algorithms: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- measured -->\nold\n<!-- /measured -->\nbelow\n")
    algorithms.write_into(page, algorithms.documented({"GRPO": algorithms.summary([rows(0.9), rows(0.8)])}, 16))
    text = page.read_text()
    assert text.startswith("above\n<!-- measured -->\n16 steps.\n")
    assert text.endswith("<!-- /measured -->\nbelow\n")
    assert "| `GRPO` | 2 | 0.40 | 0.85 | 0.21 to 1.00 | 0.50 | 96 |" in text
    assert "old" not in text
    marks = (ROOT / "docs" / "algorithms.md").read_text()
    assert marks.count("<!-- measured -->\n") == marks.count("<!-- /measured -->") == 1
