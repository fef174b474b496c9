"""`examples/math` with the real frameworks: two steps of training, every call named, tools of the MCP server; and a run
that learns.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import yaml

from agentlightning.metrics import read_metrics
from agentlightning.store import SqliteLightningStore
from examples.calc.tasks import make_tasks
from tests.typed import typed

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "math"
NEEDS = {"math_agent": ("autogen-ext", "1"), "framework_agent": ("agent-framework-core", "2")}
"""By agent: its package, and the major version of `mcp` that this wants."""


def framework(agent: str) -> None:
    """Skip where the agent's framework, or the `mcp` that it wants, is not installed."""
    package, major = NEEDS[agent]
    try:
        version(package)
        found = version("mcp")
    except PackageNotFoundError as error:
        pytest.skip(f"not installed here: {error.name}")
    if found.split(".")[0] != major:
        pytest.skip(f"{package} wants mcp {major}, here is {found}")


def train(folder: Path, agent: str) -> None:
    """`agl train`, as the README says it, for two short steps."""
    tasks, _ = make_tasks(4, 0)
    (folder / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    settings = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    short = {"steps": 2, "tasks_per_step": 2, "group_size": 4, "minibatches": 1}
    (folder / "config.json").write_text(json.dumps(settings | short))
    command = f"train --agent {EXAMPLE / agent}.py:{agent} --tasks tasks.jsonl --config config.json --run-dir run"
    done = subprocess.run(
        [sys.executable, "-m", "agentlightning", *command.split()],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("agent", NEEDS)
async def test_it_trains(agent: str, tmp_path: Path) -> None:
    framework(agent)
    train(tmp_path, agent)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["failed"] for row in rows if row["step"] > 0] == [0, 0]
    store = SqliteLightningStore(tmp_path / "run" / "store.db")
    try:
        rollouts = list(await store.query_rollouts(limit=-1))
        calls = [c for found in (await store.query_calls([r.rollout_id for r in rollouts])).values() for c in found]
    finally:
        await store.close()
    assert len(rollouts) == 2 * 2 * 4
    assert {call.info.agent for call in calls} == {"MathAgent"}
    assert len(calls) > len(rollouts), "tools were called, and their results answered"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_it_learns(tmp_path: Path) -> None:
    """On 200 questions that neither training nor validation saw, the gain is above nothing with 95 % confidence."""
    framework("math_agent")
    done = typed(tmp_path, "-m", "agentlightning", "demo", "math", "--run-dir", "run", timeout=2400)
    assert done.returncode == 0, done.stdout + done.stderr
    done = typed(tmp_path, "-m", "agentlightning", "eval", "run", timeout=900)
    found = re.search(r"95 % interval ([+-]\d\.\d+) to", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) > 0, done.stdout
