"""`examples/werewolf` with the real AgentScope: two steps on a model that knows nothing yet, and a run that learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentlightning.metrics import read_metrics
from examples.werewolf import recipe
from examples.werewolf.tasks import make_tasks
from tests.typed import typed

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]  # other people's packages

AGENT = Path(__file__).parents[2] / "examples" / "werewolf" / "werewolf_agent.py"
OPPONENTS: dict[str, dict[str, Any]] = {
    "as it was": {},
    "earlier selves": {"policies": (), "frozen": None, "league": {"every": 1, "seats": 2, "even": 0.5}},
    "each other": {"policies": ["wolves", "village"], "frozen": None},
}
"""Settings, by whom the policy plays."""
MISSING = "AgentScope 1 is not installed here: examples/werewolf/requirements.txt"


def framework() -> None:
    found = pytest.importorskip("agentscope.agent", reason=MISSING)
    if not hasattr(found, "ReActAgent"):
        pytest.skip(MISSING)


@pytest.fixture(scope="module")
def untaught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen three batches of demonstrations, and so knows nothing but the words."""
    folder = tmp_path_factory.mktemp("untaught")
    make = "from agentlightning.trainer.example import load_example; load_example('tools', 'make_model').main()"
    done = typed(folder, "-c", make, "werewolf", "--quick", "--out", "model")
    assert done.returncode == 0, done.stderr
    return folder / "model"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("opponent", OPPONENTS)
def test_two_steps_of_it(tmp_path: Path, untaught: Path, opponent: str) -> None:
    """Against the model as it was, earlier selves in either camp, and a village in training. Answers that run out of
    tokens are no moves: games come to their end all the same, and players are rewarded.
    """
    framework()
    tasks = [{**task, "rules": {"rounds": 1, "last_words": False}} for task in make_tasks()["train"][:2]]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    short = {"model": str(untaught), "steps": 2, "tasks_per_step": 1, "group_size": 2, "minibatches": 1}
    settings = recipe.SETTINGS | short | {"preflight": "warn"} | OPPONENTS[opponent]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    command = f"train --agent {AGENT}:werewolf_agent --tasks tasks.jsonl --config config.json --run-dir run"
    done = typed(tmp_path, "-m", "agentlightning", *command.split(), timeout=700)
    assert "Traceback" not in done.stderr, done.stderr
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["step"] > 0]
    assert [row["failed"] for row in rows] == [0, 0], done.stdout + done.stderr
    policies = [f"{name}/" for name in settings["policies"]] or [""]
    assert all({f"{policy}tokens" for policy in policies} <= set(row) for row in rows)
    assert all({"reward/won", "reward/alive"} <= set(row) for row in rows)
    played = any(name.startswith("opponent/") for row in rows for name in row)
    assert played == (opponent == "earlier selves"), rows
    shown = typed(tmp_path, "-m", "agentlightning", "show", "run", "--log", "--limit", "1").stdout
    assert "Night 1. Kill whom?" in shown
    assert "<history>" not in shown


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_it_learns(tmp_path: Path) -> None:
    """Of 120 games that were not played before, against the village as it was, the trained werewolves win more with
    95 % confidence.
    """
    framework()
    done = typed(tmp_path, "-m", "agentlightning", "demo", "werewolf", "--run-dir", "run", timeout=5400)
    assert done.returncode == 0, done.stdout + done.stderr
    done = typed(tmp_path, "-m", "agentlightning", "eval", "run", "--json", timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["estimates"]["mean reward"]["gain"]["low"] > 0, done.stdout
