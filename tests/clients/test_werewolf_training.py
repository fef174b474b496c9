"""`examples/werewolf` with the real AgentScope: two steps on a model that knows nothing yet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentlightning.metrics import read_metrics
from examples.werewolf import recipe
from examples.werewolf.tasks import make_tasks
from tests.typed import typed

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]  # other people's packages

AGENT = Path(__file__).parents[2] / "examples" / "werewolf" / "werewolf_agent.py"
MISSING = "AgentScope 1 is not installed here: examples/werewolf/requirements.txt"


def framework() -> None:
    found = pytest.importorskip("agentscope.agent", reason=MISSING)
    if not hasattr(found, "ReActAgent"):
        pytest.skip(MISSING)


@pytest.fixture(scope="module")
def untaught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen three batches of demonstrations, and so knows nothing but the words."""
    folder = tmp_path_factory.mktemp("untaught")
    make = "from agentlightning.cli.example import load_example; load_example('tools', 'make_model').main()"
    done = typed(folder, "-c", make, "werewolf", "--quick", "--out", "model")
    assert done.returncode == 0, done.stderr
    return folder / "model"


@pytest.mark.timeout(900)
def test_two_steps_of_it(tmp_path: Path, untaught: Path) -> None:
    """Against the model as it was. Answers that run out of tokens are no moves: games come to their end all the same,
    and players are rewarded.
    """
    framework()
    tasks = [{**task, "rules": {"rounds": 1, "last_words": False}} for task in make_tasks()["train"][:2]]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    short = {"model": str(untaught), "steps": 2, "tasks_per_step": 1, "group_size": 2, "minibatches": 1}
    (tmp_path / "config.json").write_text(json.dumps(recipe.SETTINGS | short | {"preflight": "warn"}))
    command = f"train --agent {AGENT}:werewolf_agent --tasks tasks.jsonl --config config.json --run-dir run"
    done = typed(tmp_path, "-m", "agentlightning", *command.split(), timeout=700)
    assert "Traceback" not in done.stderr, done.stderr
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["step"] > 0]
    assert [row["failed"] for row in rows] == [0, 0], done.stdout + done.stderr
    assert all({"wolves/reward", "reward/won", "reward/alive"} <= set(row) for row in rows)
    shown = typed(tmp_path, "-m", "agentlightning", "show", "run", "--log", "--limit", "1").stdout
    assert "Night 1. Kill whom?" in shown
    assert "<history>" not in shown
