"""Benchmarks: what that of algorithms makes of its runs (intervals, a table for the documentation, and no run twice),
and that the one for GPUs runs, which nobody may have had when it was changed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import gpu

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


@pytest.mark.slow
def test_each_way_on_a_gpu_is_run_on_a_cpu_and_they_agree(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    gpu.main(["--device", "cpu", "--quick", "--json"])
    shown = capsys.readouterr().out.splitlines()
    figures = json.loads(shown[-1])
    ways = [f"tiny_96_learner_{name}" for name in ("tree", "tree_by_segments", "rows_packed", "rows_padded")]
    assert all(figures[f"{way}_tokens_per_s"] > 0 for way in [*ways, "tiny_96_engine"])
    assert all(figures[f"{way}_gap"] < 0.5 for way in ways)
    assert any(line.startswith("trl") and "not installed" in line for line in shown)
    assert shown[0].startswith("On a CPU, which says nothing of a GPU"), "nobody may take this for a GPU's table"
    own = [record.getMessage() for record in caplog.records if record.name.startswith("agentlightning.learner")]
    assert not own, "each way is computed as it is called"


def test_without_a_gpu_one_sentence_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    gpu.main(["--json"])
    assert capsys.readouterr().out == "There is no GPU here that torch could use, so nothing is measured.\n"


@pytest.mark.slow
def test_what_has_no_room_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    def too_large() -> gpu.Row:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert str(gpu.row_of("rows", too_large)).split() == ["rows", "out", "of", "memory"]
