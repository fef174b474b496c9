"""`examples/support` with the real tau2: two steps on a model that knows nothing yet, and a run that learns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agentlightning.metrics import read_metrics
from examples.support import recipe
from examples.support.cases import make_tasks
from tests.typed import typed

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]  # other people's packages

AGENT = Path(__file__).parents[2] / "examples" / "support" / "support_agent.py"


def installed() -> None:
    pytest.importorskip("tau2.registry", reason="tau2 is not installed here: examples/support/requirements.txt")


@pytest.mark.timeout(500)
def test_two_steps_of_it(tmp_path: Path) -> None:
    """A model that was taught for three steps knows nothing, so nothing is learned; every rollout is graded."""
    installed()
    make = "from agentlightning.cli.example import load_example; load_example('tools', 'make_model').main()"
    done = typed(tmp_path, "-c", make, "support", "--quick", "--out", "model", timeout=200)
    assert done.returncode == 0, done.stderr
    tasks = make_tasks()["train"][:4]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    short = {"model": "./model", "steps": 2, "tasks_per_step": 2, "group_size": 4, "preflight": "warn"}
    (tmp_path / "config.json").write_text(json.dumps(recipe.SETTINGS | short))
    command = f"train --agent {AGENT}:support_agent --tasks tasks.jsonl --config config.json --run-dir run"
    done = typed(tmp_path, "-m", "agentlightning", *command.split(), timeout=400)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Nothing was learned" in done.stdout
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["step"] > 0]
    assert [(row["failed"], row["reward"]) for row in rows] == [(0, 0), (0, 0)]
    assert all({"reward/score", "reward/calls", "reward/errors", "reward/questions"} <= set(row) for row in rows)


@pytest.mark.timeout(120)
def test_the_tasks_of_a_domain_are_written_as_files(tmp_path: Path) -> None:
    installed()
    done = typed(tmp_path, "-m", "examples.support.domains", "retail", "data/retail", timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {
        part: (tmp_path / "data" / "retail" / f"{part}.jsonl").read_text().splitlines() for part in ("train", "test")
    }
    assert {part: len(rows) for part, rows in lines.items()} == {"train": 74, "test": 40}
    assert {json.loads(line)["domain"] for rows in lines.values() for line in rows} == {"retail"}
    assert not set(lines["train"]) & set(lines["test"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_it_learns(tmp_path: Path) -> None:
    """On 200 cases that neither training nor validation saw, the gain is above nothing with 95 % confidence."""
    installed()
    own = {"AGL_CACHE": str(tmp_path / "cache")}
    command = "-m agentlightning demo support --run-dir run"
    done = typed(tmp_path, *command.split(), environment=own, timeout=2400)
    assert done.returncode == 0, done.stdout + done.stderr
    done = typed(tmp_path, "-m", "agentlightning", "eval", "run", environment=own, timeout=900)
    found = re.search(r"95 % interval ([+-]\d\.\d+) to", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) > 0, done.stdout
