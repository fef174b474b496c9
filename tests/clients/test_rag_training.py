"""`examples/rag` with the real Agents SDK: two steps on a model that knows nothing yet, and a run that learns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agentlightning.metrics import read_metrics
from examples.rag import recipe
from examples.rag.corpus import write_data
from tests.typed import typed

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]  # other people's packages

AGENT = Path(__file__).parents[2] / "examples" / "rag" / "rag_agent.py"


def framework() -> None:
    pytest.importorskip("agents.mcp", reason="the Agents SDK is not installed here: examples/rag/requirements.txt")


@pytest.mark.timeout(500)
def test_two_steps_of_it(tmp_path: Path) -> None:
    """A model that was taught for three steps knows nothing, so nothing is learned; every rollout is graded."""
    framework()
    make = "from agentlightning.trainer.example import load_example; load_example('tools', 'make_model').main()"
    done = typed(tmp_path, "-c", make, "rag", "--quick", "--out", "model")
    assert done.returncode == 0, done.stderr
    tasks = write_data(tmp_path / "data")["train"][:4]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    short = {"model": "./model", "steps": 2, "tasks_per_step": 2, "group_size": 4, "preflight": "warn"}
    (tmp_path / "config.json").write_text(json.dumps(recipe.SETTINGS | short))
    command = f"train --agent {AGENT}:rag_agent --tasks tasks.jsonl --config config.json --run-dir run"
    done = typed(tmp_path, "-m", "agentlightning", *command.split(), timeout=400)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Nothing was learned" in done.stdout
    assert "Traceback" not in done.stderr, "the server is closed with the program"
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["step"] > 0]
    assert [(row["failed"], row["reward"]) for row in rows] == [(0, 0), (0, 0)]
    assert all({"reward/score", "reward/right", "reward/tagged", "reward/searches"} <= set(row) for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_it_learns(tmp_path: Path) -> None:
    """On 200 questions that neither training nor validation saw, the gain is above nothing with 95 % confidence."""
    framework()
    own = {"AGL_CACHE": str(tmp_path / "cache")}
    command = "-m agentlightning demo rag --run-dir run"
    done = typed(tmp_path, *command.split(), environment=own, timeout=2400)
    assert done.returncode == 0, done.stdout + done.stderr
    done = typed(tmp_path, "-m", "agentlightning", "eval", "run", environment=own, timeout=900)
    found = re.search(r"95 % interval ([+-]\d\.\d+) to", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) > 0, done.stdout
