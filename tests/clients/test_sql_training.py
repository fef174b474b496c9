"""`examples/sql` with the real LangGraph: two steps on a model that knows nothing yet, and a run that learns."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from agentlightning.metrics import read_metrics
from agentlightning.store import SqliteLightningStore
from examples.sql.data import make_data

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]  # other people's packages

EXAMPLE = Path(__file__).parents[2] / "examples" / "sql"


def command(folder: Path, *arguments: str, timeout: float, code: int = 0) -> str:
    """What the command prints; it must end with the code."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "AGL_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def langgraph() -> None:
    pytest.importorskip("langgraph", reason="LangGraph is not installed here: examples/sql/requirements.txt")
    pytest.importorskip("langchain_openai", reason="langchain-openai is not installed here")


@pytest.mark.timeout(500)
async def test_two_steps_train_the_writers_and_not_the_checker(tmp_path: Path) -> None:
    langgraph()
    make = "from agentlightning.trainer.example import load_example; load_example('tools', 'make_model').main()"
    command(tmp_path, "-c", make, "sql", "--quick", "--out", "model", timeout=200)
    tasks = make_data(tmp_path / "data")["train"][:4]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    short = {"model": "./model", "steps": 2, "tasks_per_step": 2, "group_size": 4, "preflight": "warn"}
    settings = yaml.safe_load((EXAMPLE / "config.yaml").read_text()) | short
    (tmp_path / "config.json").write_text(json.dumps(settings))
    train = f"train --agent {EXAMPLE}/sql_agent.py:sql_agent --tasks tasks.jsonl --config config.json --run-dir run"
    said = command(tmp_path, "-m", "agentlightning", *train.split(), timeout=400, code=1)
    assert "Nothing was learned" in said, "nor could there be"
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["step"] > 0]
    assert [row["failed"] for row in rows] == [0, 0]
    assert len(rows) == 2
    assert all({"reward/correct", "reward/writer", "reward/checker"} <= set(row) for row in rows)
    store = SqliteLightningStore(tmp_path / "run" / "store.db")
    try:
        ids = [r.rollout_id for r in await store.query_rollouts(limit=-1)]
        calls = [call.info for found in (await store.query_calls(ids)).values() for call in found]
    finally:
        await store.close()
    agents = Counter(call.agent for call in calls)
    assert set(agents) <= {"write", "check", "rewrite"}
    assert agents["write"] == len(ids)
    assert all(not call.trained for call in calls if call.agent == "check")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_it_learns(tmp_path: Path) -> None:
    """On 200 questions that neither training nor validation saw, the gain is above nothing with 95 % confidence."""
    langgraph()
    command(tmp_path, "-m", "agentlightning", "demo", "sql", "--run-dir", "run", timeout=5400)
    said = command(tmp_path, "-m", "agentlightning", "eval", "run", "--limit", "200", timeout=1800)
    found = re.search(r"95 % interval ([+-]\d\.\d+) to", said)
    assert found is not None, said
    assert float(found[1]) > 0, said
