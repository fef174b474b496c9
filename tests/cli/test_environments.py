"""`--env` and `agl env`: what they print, and which options go together."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from agentlightning.environments import SCHEMES
from tests.environments.harbor_tasks import engine_or_skip, write_task
from tests.typed import agl as typed_agl

GAMES = "gym:tests.environments.games"
ROOT = Path(__file__).parents[2]
agl = partial(typed_agl, ROOT)
"""Where the module of the games is found."""


def test_schemes_are_listed() -> None:
    shown = agl("env", "list")
    assert all(f"{scheme}:" in shown.stdout for scheme in SCHEMES)
    assert set(json.loads(agl("env", "list", "--json").stdout)) == set(SCHEMES)


def test_one_is_tried_out(tmp_path: Path) -> None:
    good = agl("env", "check", f"{GAMES}:Echo-v0", "--env-option", "numbers=3", "--limit", "4")
    assert good.returncode == 0
    assert "4 of 64 tasks were tried: 4 of 4 trials are as expected." in good.stdout
    endless = ["env", "check", f"{GAMES}:Endless-v0", "--env-option", "breaks_at=2", "--limit"]
    same = agl(*endless, "3").stdout
    assert (same.count("it broke"), "seed 0 (and 2 more), random actions: " in same) == (1, True), same
    bad = agl(*endless, "1", "--json")
    assert bad.returncode == 1
    assert "it broke" in json.loads(bad.stdout)[0]["why"]


@pytest.mark.slow
def test_tasks_of_harbor_are_tried_out_and_run_with_their_solution(tmp_path: Path) -> None:
    engine_or_skip("bubblewrap")
    write_task(tmp_path / "tasks" / "one")
    given = ["--env-option", "engine=bubblewrap"]
    good = agl("env", "check", f"harbor:{tmp_path}/tasks", *given)
    assert (good.returncode, "2 of 2 trials are as expected" in good.stdout) == (0, True), good.stdout
    run = agl(
        "run", "--env", f"harbor:{tmp_path}/tasks", *given, "--agent", "oracle", "--model", "calc",
        "--run-dir", str(tmp_path / "run"),
    )  # fmt: skip
    assert "1 rollout, mean reward 1.000" in run.stdout, run.stdout + run.stderr


@pytest.mark.slow
def test_tasks_of_a_registry_are_tried_out(tmp_path: Path) -> None:
    engine_or_skip("bubblewrap")
    write_task(tmp_path / "tasks" / "one")
    tasks = [{"name": "one", "path": "tasks/one"}]
    (tmp_path / "registry.json").write_text(json.dumps([{"name": "my-tasks", "version": "1.0", "tasks": tasks}]))
    given = ["--env-option", "engine=bubblewrap", "--env-option", f"registry_path={tmp_path}/registry.json"]
    named = agl("env", "check", "harbor:my-tasks@1.0", *given)
    assert (named.returncode, "2 of 2 trials are as expected" in named.stdout) == (0, True), named.stdout + named.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["run"], "Say which agent"),
        (["run", "--agent", "cat"], "Say which tasks"),
        (["run", "--env", f"{GAMES}:Echo-v0", "--isolation", "bubblewrap"], "--isolation is for programs"),
        (["run", "--env", f"{GAMES}:Echo-v0", "--agent", "codex"], "an agent of its own"),
        (["run", "--env-option", "tasks=3", "--agent", "cat", "--tasks", "x.jsonl"], "it is for --env"),
        (["run", "--env", f"{GAMES}:Echo-v0", "--env-option", "tasks"], "give NAME=VALUE"),
        (["env", "check", f"{GAMES}:Echo-v0", "--env-option", "nmbers=3"], "nmbers"),
        (["env", "check", "gim:Echo-v0"], "gym:…"),
        (["runner", "--server", "http://127.0.0.1:1"], "Say which agent runs here"),
        (["train", "--env", f"{GAMES}:Echo-v0", "--agent", "codex"], "an agent of its own"),
        (["doctor"], "Say which agent"),
        (["optimize", "--env", f"{GAMES}:Nothing-v0"], "Nothing"),
        (["eval", "calc", "--env", f"{GAMES}:Nothing-v0"], "Nothing"),
    ],
)
def test_what_does_not_go_together_is_said(given: list[str], words: str) -> None:
    refused = agl(*given)
    assert refused.returncode != 0
    assert words in " ".join((refused.stdout + refused.stderr).split())


@pytest.mark.slow
def test_an_environment_is_examined_trained_on_and_evaluated(tmp_path: Path) -> None:
    env = ["--env", f"{GAMES}:Echo-v0", "--env-option", "answer_tokens=16", "--env-option", "numbers=2"]
    looked = agl("doctor", *env, "--model", "calc", "--seconds", "120")
    assert "rollouts" in looked.stdout, looked.stdout + looked.stderr
    settings = [a for s in ("tasks_per_step=8", "group_size=8", "val_every=2") for a in ("--set", s)]
    trained = agl(
        "train", *env, "--env-option", "val_tasks=4", "--model", "calc", "--steps", "2", *settings,
        "--run-dir", str(tmp_path / "run"),
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    measured = agl("eval", str(tmp_path / "run"), *env, "--limit", "4", "--json")
    assert json.loads(measured.stdout)["models"]["trained"], measured.stderr
    refused = agl("eval", str(tmp_path / "run"), "--limit", "4", "--json")
    assert f"the environment {GAMES}:Echo-v0" in refused.stderr
    again = agl("eval", str(tmp_path / "run"), "--trust", "--limit", "4", "--json")
    assert json.loads(again.stdout)["models"]["trained"], again.stderr
