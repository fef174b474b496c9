"""`examples/terminal` with the real Codex: two steps on a model that knows nothing yet, and a run that learns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from agentlightning.errors import ConfigError
from agentlightning.metrics import read_metrics
from examples.terminal.program import codex, install_command, make_agent
from examples.terminal.repositories import make_tasks
from tests.clients.test_sql_training import command

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]  # other people's packages

EXAMPLE = Path(__file__).parents[2] / "examples" / "terminal"


def installed(cache: Path) -> None:
    """Show the installed Codex to commands whose cache is elsewhere."""
    try:
        make_agent()
    except ConfigError as error:
        pytest.skip(str(error))
    folder = Path(install_command()[install_command().index("--prefix") + 1])
    (cache / folder.name).parent.mkdir(parents=True)
    (cache / folder.name).symlink_to(folder)
    assert codex().startswith(str(folder))


@pytest.mark.timeout(500)
def test_two_steps_of_it(tmp_path: Path) -> None:
    """A model that was taught for three steps knows nothing, so nothing is learned; every rollout is graded."""
    installed(tmp_path / "cache")
    make = "from agentlightning.trainer.example import load_example; load_example('tools', 'make_model').main()"
    command(tmp_path, "-c", make, "terminal", "--quick", "--out", "model", timeout=200)
    tasks = make_tasks()["train"][:4]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    short = {
        "model": "./model",
        "steps": 2,
        "tasks_per_step": 2,
        "group_size": 4,
        "preflight": "warn",
        "max_tokens": 64,
    }
    settings = yaml.safe_load((EXAMPLE / "config.yaml").read_text()) | short
    (tmp_path / "config.json").write_text(json.dumps(settings))
    train = f"train --agent {EXAMPLE}/terminal_agent.py:terminal_agent --tasks tasks.jsonl --config config.json"
    said = command(tmp_path, "-m", "agentlightning", *train.split(), "--run-dir", "run", timeout=400, code=1)
    assert "Nothing was learned" in said, "nor could there be"
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["step"] > 0]
    assert [(row["failed"], row["reward"]) for row in rows] == [(0, 0), (0, 0)]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_it_learns(tmp_path: Path) -> None:
    """On 200 modules that neither training nor validation saw, the gain is above nothing with 95 % confidence."""
    installed(tmp_path / "cache")
    command(tmp_path, "-m", "agentlightning", "demo", "terminal", "--run-dir", "run", timeout=5400)
    said = command(tmp_path, "-m", "agentlightning", "eval", "run", timeout=1500)
    found = re.search(r"95 % interval ([+-]\d\.\d+) to", said)
    assert found is not None, said
    assert float(found[1]) > 0, said
