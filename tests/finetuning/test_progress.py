"""What a job's events say of its run's metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentlightning.finetuning.progress import measures_of, metrics_of, written_at


def test_the_rewards_of_graders_are_in_the_scores(tmp_path: Path) -> None:
    row = {"step": 1, "reward": 0.5, "reward/reward": 0.5, "reward/exact": 0.25, "reward/steps": 1.0, "val_reward": 0.7}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"step": 2, "reward": 0.5}) + "\n")
    first, second = metrics_of(tmp_path, "reinforcement")
    graders = [{"name": "exact", "train_reward_mean": 0.25}, {"name": "steps", "train_reward_mean": 1.0}]
    assert first["scores"] == {"train_reward_mean": 0.5, "valid_reward_mean": 0.7, "graders": graders}
    assert "errors" not in first
    assert second["scores"] == {"train_reward_mean": 0.5}


def test_what_graders_did_is_under_the_names_of_the_api(tmp_path: Path) -> None:
    def grade(flags: list[str], seconds: float) -> dict[str, Any]:
        exact = {"name": "exact", "type": "string_check", "reward": 1.0, "flags": [], "seconds": 0.25}
        code = {"name": "code", "type": "python", "reward": None, "flags": flags, "seconds": seconds}
        usage = {"judge": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}}
        return {"graders": [exact, code], "model_grader_token_usage_per_model": usage}

    measured = measures_of([grade([], 1.0), grade(["python_grader_runtime_error"], 2.0)])
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "rollouts": 2, "failed": 1, **measured}) + "\n")
    (row,) = metrics_of(tmp_path, "reinforcement")
    failed = {"train_python_grader_runtime_error_mean": 0.5, "train_python_grader_runtime_error_count": 1}
    assert row["errors"] == {"graders": [{"name": "code", **failed}]}
    times = [("exact", 0.25), ("code", 1.5)]
    assert row["timing"]["graders"] == [{"name": n, "train_execution_latency_mean": s} for n, s in times]
    tokens = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
    assert row["model_graders_token_usage"] == {"judge": tokens}


def test_a_checkpoint_that_is_removed_meanwhile_is_no_fault(tmp_path: Path) -> None:
    """The job's process keeps the last ones only, and removes others while the server looks at them."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "checkpoint.json").write_text("{}")
    assert list(written_at({1: tmp_path / "removed", 2: tmp_path / "kept"})) == [2]
