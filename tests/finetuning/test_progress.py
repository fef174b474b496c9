"""What a job's events say of its run's metrics."""

from __future__ import annotations

import json
from pathlib import Path

from agentlightning.finetuning.progress import metrics_of


def test_the_rewards_of_graders_are_in_the_scores(tmp_path: Path) -> None:
    row = {"step": 1, "reward": 0.5, "reward/reward": 0.5, "reward/exact": 0.25, "reward/steps": 1.0, "val_reward": 0.7}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"step": 2, "reward": 0.5}) + "\n")
    first, second = metrics_of(tmp_path, "reinforcement")
    graders = [{"name": "exact", "train_reward_mean": 0.25}, {"name": "steps", "train_reward_mean": 1.0}]
    assert first["scores"] == {"train_reward_mean": 0.5, "valid_reward_mean": 0.7, "graders": graders}
    assert second["scores"] == {"train_reward_mean": 0.5}
