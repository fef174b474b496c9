"""The whole path, really: real model, real HTTP, real SQLite, and a reward that rises."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from agentlightning.metrics import read_metrics

ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "140"}


def agl(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agentlightning", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT, check=False, timeout=240)


def wait_for_step(metrics: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not (metrics.exists() and any(m["step"] >= step for m in read_metrics(metrics))):
        assert process.poll() is None, "it ended too soon"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def demo(folder: Path, steps: int) -> tuple[Path, str]:
    """A training run by the command line: its folder and what it printed."""
    done = agl("demo", "calc", "--steps", str(steps), "--run-dir", "run", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run", done.stdout


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return demo(tmp_path_factory.mktemp("begun"), steps=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return demo(tmp_path_factory.mktemp("trained"), steps=14)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_reward_rises(trained: tuple[Path, str]) -> None:
    rows = read_metrics(trained[0] / "metrics.jsonl")
    assert [m["step"] for m in rows] == list(range(15))
    rewards = [m["reward"] for m in rows[1:]]
    early, late = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert late > early + 0.15, rewards
    assert max(m["logprob_gap_max"] for m in rows[1:]) < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_run_leaves_what_it_promises(begun: tuple[Path, str]) -> None:
    run, printed = begun
    assert (run / "curve.png").stat().st_size > 5000
    assert (run / "store.db").is_file()
    checkpoint = run / "checkpoints" / "step-000002"
    assert json.loads((checkpoint / "checkpoint.json").read_text())["step"] == 2
    assert "agentlightning eval" in printed, "as this command was called"
    assert "before training" in printed
    assert "calc(" in printed, "the transcript shows the tool calls"


@pytest.mark.slow
def test_the_checkpoint_loads_with_plain_transformers(begun: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(begun[0] / "checkpoints" / "step-000002" / "model")
    tokenizer = AutoTokenizer.from_pretrained(begun[0] / "checkpoints" / "step-000002" / "model")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 + 3?"}], add_generation_prompt=True, return_tensors="pt"
    )
    ids = prompt["input_ids"]
    generated = model.generate(ids, attention_mask=prompt["attention_mask"], max_new_tokens=5)  # pyright: ignore
    assert generated.shape[1] > ids.shape[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_eval_finds_the_improvement_in_a_fresh_process(trained: tuple[Path, str], tmp_path: Path) -> None:
    done = agl("eval", str(trained[0]), "--limit", "100", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    gain = next(line for line in done.stdout.splitlines() if line.startswith("Gain"))
    assert float(gain.split()[5].rstrip(",")) > 0.1, done.stdout
    done = agl("eval", str(trained[0]), "--limit", "8", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    (estimate,) = found["estimates"].values()
    assert {name: one["value"] for name, one in estimate.items()}.keys() == {"base", "trained", "gain"}
    assert estimate["gain"]["value"] == pytest.approx(estimate["trained"]["value"] - estimate["base"]["value"])
    assert estimate["base"]["tasks"] == 8


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_is_repeated_from_its_run_json(trained: tuple[Path, str], tmp_path: Path) -> None:
    changed = ("--set", "steps=1", "--run-dir", "again")
    done = agl("train", "--config", str(trained[0] / "run.json"), "--trust", *changed, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    first, again = (json.loads((folder / "run.json").read_text()) for folder in (trained[0], tmp_path / "again"))
    for same in ("algorithm", "agent", "source", "tasks_hash", "val_tasks_hash", "version"):
        assert again[same] == first[same], same
    differ = {name for name, value in again["settings"].items() if value != first["settings"][name]}
    assert differ == {"steps"}
    assert again["run_id"] != first["run_id"]


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_ctrl_c_keeps_the_last_step_and_resume_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentlightning", "demo", "calc", "--steps", "4", "--run-dir", "run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=ENVIRONMENT)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for_step(metrics, 2, process)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert "agentlightning demo calc --resume run" in printed  # as it was called
    before = read_metrics(metrics)
    done = agl("demo", "calc", "--steps", "4", "--resume", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    after = read_metrics(metrics)
    assert [m["step"] for m in after] == [0, 1, 2, 3, 4]
    assert after[: len(before)] == before, "the metrics of finished steps stay"


SCRIPT = """
import agentlightning as agl
from agentlightning.trainer.example import load_example

recipe, agent = load_example("calc", "recipe"), load_example("calc", "calc_agent").calc_agent
algorithm = agl.GRPO(
    model="calc", steps=4, tasks_per_step=4, group_size=4, max_context=512, save_every=1, ranks=RANKS
)
print(agl.Trainer(algorithm=algorithm, run_dir="run").fit(agent, recipe.train_tasks()).checkpoint)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "killed"), [(1, "embedded"), (2, "embedded.rank")])
def test_a_model_process_that_is_killed_costs_no_finished_step(tmp_path: Path, ranks: int, killed: str) -> None:
    """So does a rank of its learner."""
    command = [sys.executable, "-c", SCRIPT.replace("RANKS", str(ranks))]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=ENVIRONMENT
    )
    wait_for_step(tmp_path / "run" / "metrics.jsonl", 2, process)
    for child in psutil.Process(process.pid).children(recursive=True):
        if f"agentlightning.backend.{killed}" in child.cmdline():
            child.kill()
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, printed + errors
    assert "Goes on after step" in printed
    told = (tmp_path / "run" / "log.txt").read_text()
    assert "The run goes on from" in told
    assert ranks == 1 or "Learner rank 1 (process " in told
    assert [m["step"] for m in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    assert printed.splitlines()[-1].endswith("step-000004")
