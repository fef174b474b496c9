"""A run that goes on says where, what is done again and which settings changed; a finished one says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentlightning.trainer.live import known_settings
from agentlightning.trainer.words import last_step, resuming
from tests.typed import agl

CHATS = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n'


def test_what_was_not_saved_is_done_again() -> None:
    said = resuming(Path("runs/x/checkpoints/step-000011"), 11, 14, {"steps": 20}, {"steps": 20}, 20)
    assert "after step 11 of 20" in said
    assert "Steps 12 to 14" in said
    assert "Changed" not in said


def test_changed_settings_are_named_with_both_values() -> None:
    before, now = {"learning_rate": 1e-4, "loss": "ppo_clip", "seed": 0}, {"learning_rate": 5e-4, "loss": "gspo"}
    said = resuming(Path("c"), 3, 3, before, {**now, "seed": 0, "of_a_newer_version": 1}, None)
    assert "learning_rate was 0.0001, is 0.0005" in said
    assert "loss was ppo_clip, is gspo" in said
    assert "seed" not in said
    assert "newer" not in said


def test_how_to_keep_settings_is_said_where_more_than_the_length_changed() -> None:
    place = Path("runs/x/checkpoints/step-000003")
    assert "--config" not in resuming(place, 3, 3, {"steps": 3}, {"steps": 5}, 5)
    said = resuming(place, 3, 3, {"group_size": 4}, {"group_size": 8}, 5)
    assert said.endswith("give them again, or  --config runs/x/run.json  with agl train.")


def test_another_algorithm_is_named_first(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"algorithm": "GRPO", "settings": {"loss": "ppo_clip"}}')
    now = {"algorithm": "RLOO", "loss": "reinforce"}
    said = resuming(tmp_path / "checkpoints" / "step-000001", 1, 1, known_settings(tmp_path), now, None)
    assert "Changed settings: algorithm was GRPO, is RLOO; loss was" in said


@pytest.mark.slow
def test_as_typed(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(CHATS * 4)
    first = ("train", "--data", "chats.jsonl", "--set", "tasks_per_step=2", "--set", "max_context=64")
    assert agl(tmp_path, *first, "--name", "x", "--steps", "2").returncode == 0
    again = agl(tmp_path, *first, "--resume", "runs/x", "--steps", "2")
    assert again.returncode == 0, again.stderr
    assert "finished already: all 2 steps" in again.stdout
    more = agl(tmp_path, *first, "--resume", "runs/x", "--steps", "3", "--set", "learning_rate=1e-5")
    assert more.returncode == 0, more.stderr
    assert "Goes on after step 2 of 3" in more.stdout
    assert "learning_rate was None, is 1e-05" in more.stdout
    assert known_settings(tmp_path / "runs" / "x")["steps"] == 3


def test_no_row_is_no_step() -> None:
    assert last_step([]) == 0
    assert last_step([{"step": 0}, {"step": 2}, {"val_reward": 1.0}]) == 2
