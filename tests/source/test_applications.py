"""The tables of the applications: what the script makes of runs, and that the pages hold what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import applications

ROOT = Path(__file__).parents[2]


def result(seed: int, after: float = 0.8) -> dict[str, Any]:
    estimate = {
        "base": {"value": 0.3, "low": 0.2, "high": 0.4, "tasks": 200},
        "trained": {"value": after, "low": after - 0.1, "high": after + 0.1, "tasks": 200},
        "gain": {"value": after - 0.3, "low": 0.4, "high": 0.6},
    }
    parts = {"reward/first": [0.25, 0.75 + seed / 10], "reward/rare": [None, 0.5]}
    return {
        **{"name": "sql", "seed": seed, "steps": 24, "seconds": 150, "rollouts": 1536, "failed": 2},
        **{"parts": parts, "eval": estimate},
    }


def test_a_row_for_each_seed_and_the_mean_of_the_parts() -> None:
    lines = applications.tables([result(0), result(1)]).splitlines()
    assert lines[0].startswith("| seed | 200 held-out tasks before (95 % interval) | after 24 steps |")
    assert lines[2] == (
        "| 0 | 0.300 (0.200 to 0.400) | 0.800 (0.700 to 0.900) | **+0.500** (+0.400 to +0.600) | 2.5 min | 2 of 1,536 |"
    )
    assert lines[-1] == "| `reward/first` | 0.25 | 0.80 |"


def test_only_what_is_between_the_marks_of_an_example_is_replaced() -> None:
    empty = "<!-- applications: rag -->\n<!-- /applications -->\n"
    page = f"a\n<!-- applications: sql -->\nold\n<!-- /applications -->\nb\n{empty}"
    written = applications.with_tables(page, [result(0)])
    assert written.startswith("a\n<!-- applications: sql -->\n| seed |")
    assert "old" not in written
    assert written.endswith(f"<!-- /applications -->\nb\n{empty}")


def test_the_first_and_the_last_steps_are_told_apart() -> None:
    rows: list[dict[str, Any]] = [{"step": 0, "val_reward": 0.3, "time": 90.0}]
    for step in range(1, 13):
        row = {"step": step, "rollouts": 64, "failed": step == 3, "reward/first": step / 12, "time": 100.0 + 10 * step}
        rows.append({**row, "sampling_from": 92.0 + 10 * step})
    found = applications.summary(rows)
    assert found["parts"] == {"reward/first": [pytest.approx(2.5 / 12, abs=1e-4), pytest.approx(10.5 / 12, abs=1e-4)]}
    assert (found["steps"], found["seconds"], found["rollouts"], found["failed"]) == (12, 118, 768, 1)


def test_a_result_takes_the_place_of_an_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applications, "RESULTS", tmp_path / "applications.jsonl")
    for given in (result(1), result(0), result(1, 0.9)):
        applications.keep(given)
    kept = [json.loads(line) for line in (tmp_path / "applications.jsonl").read_text().splitlines()]
    assert [(r["seed"], r["eval"]["trained"]["value"]) for r in kept] == [(0, 0.8), (1, 0.9)]


@pytest.mark.parametrize("page", [page for page in applications.PAGES if page.exists()], ids=lambda p: p.parent.name)
def test_the_pages_say_what_was_measured(page: Path) -> None:
    text = page.read_text()
    assert text == applications.with_tables(text, applications.read_results())
