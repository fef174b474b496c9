"""`agl whatif` on a run that was trained: the step is rebuilt as the run took it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from agentlightning.metrics import read_metrics
from tests.typed import agl, typed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
SCRIPT = """
import agentlightning as agl
from agentlightning.trainer.example import load_example
from agentlightning.metrics import SilentConsole

recipe, calc = load_example("calc", "recipe"), load_example("calc", "calc_agent")
kept = {"save_every": 1, "keep_checkpoints": 9, "val_every": 99, "gradient_noise_every": 2}
algorithm = agl.GRPO(model="calc", steps=3, tasks_per_step=6, group_size=6, max_context=512, learning_rate=1e-3, **kept)
agl.Trainer(algorithm=algorithm, run_dir="run", console=SilentConsole()).fit(calc.calc_agent, recipe.train_tasks())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whatif")
    (folder / "train.py").write_text(SCRIPT)
    done = typed(folder, "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_step_is_rebuilt_as_it_was_taken(folder: Path) -> None:
    rows = {row["step"]: row for row in read_metrics(folder / "run" / "metrics.jsonl")}
    for step in (1, 3):
        done = agl(folder, "whatif", "run", "--step", str(step), "--advantage", "rloo", "--loss", "reinforce", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout)
        taken, reinforce, rloo = found["compared"]
        assert found["weights_step"] == step - 1
        assert found["rollouts"] == 36
        assert found["logprob_gap"] < 1e-3, "these weights sampled them"
        assert taken["grad_norm"] == pytest.approx(rows[step]["grad_norm"], rel=1e-3)
        assert taken["cosine"] == pytest.approx(1.0)
        assert reinforce["cosine"] == pytest.approx(1.0, abs=1e-4), "nothing was clipped: all ratios are 1"
        assert 0.5 < rloo["cosine"] <= 1.0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("more", [{"replay": 4, "replay_size": 8}, {"ranks": 2, "gradient_noise_every": 0}])
def test_replayed_groups_and_several_ranks_are_rebuilt_too(tmp_path: Path, more: dict[str, int]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("**kept)", f"**kept | {more})"))
    done = typed(tmp_path, "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    row = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert row["step"] == 3
    assert ("replay" in more) == bool(row.get("replayed"))
    done = agl(tmp_path, "whatif", "run", "--step", "3", "--advantage", "rloo", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["rollouts"] == 36 + row.get("replayed", 0)
    assert found["compared"][0]["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-3)


def test_the_table_says_which_weights_are_used(folder: Path) -> None:
    done = agl(folder, "whatif", "run", "--step", "3")
    assert "after step 2" in done.stdout
    assert "loss=gspo" in done.stdout
    assert "gradient norm" in done.stdout
    shutil.copytree(folder / "run", folder / "pruned", dirs_exist_ok=True)
    for checkpoint in ("step-000001", "step-000002"):
        shutil.rmtree(folder / "pruned" / "checkpoints" / checkpoint)
    done = agl(folder, "whatif", "pruned", "--step", "3", "--credit", "gigpo")
    assert "after step 0" in done.stdout, done.stderr
    assert "these are older" in done.stdout
    assert agl(folder, "whatif", "run", "--step", "9").returncode == 1
    refused = agl(folder, "whatif", "run", "--loss", "nope")
    assert "it can be 'cispo'" in refused.stderr


def test_the_noise_of_the_gradient_is_in_the_metrics(folder: Path) -> None:
    rows = [row for row in read_metrics(folder / "run" / "metrics.jsonl") if row["step"]]
    two_differ = [round(6 * (1 - row["flat_groups"])) >= 2 for row in rows]
    assert ["gradient_cosine" in row for row in rows] == [two_differ[0], False, two_differ[2]]
    for row in (row for row in rows if "gradient_cosine" in row):
        assert -1 <= row["gradient_cosine"] <= 1
        assert row["gradient_noise"] > 0
        assert (row["gradient_signal"] > 0) == (row["gradient_cosine"] > 0)
