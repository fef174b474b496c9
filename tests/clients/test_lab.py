"""`examples/math/train_framework_agent.py`, a script of the form that agent-framework-lab documents, with the real
packages: an MCP server in each rollout, the lab's tracer, `VERL(config)`, a dummy key, two workers, `--debug`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from agentlightning.metrics import read_metrics
from agentlightning.store import SqliteLightningStore

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
TASKS = (ROOT / "examples" / "programs" / "one_step.jsonl").read_text().splitlines(keepends=True)


@pytest.fixture(autouse=True)
def installed() -> None:
    try:
        version("agent-framework-lab")
        found = version("mcp")
    except PackageNotFoundError as error:
        pytest.skip(f"not installed here: {error.name}")
    if found.split(".")[0] != "2":
        pytest.skip(f"agent-framework's tool for MCP wants mcp 2, here is {found}")


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script on two steps' tasks, as it is typed in a folder of the user's own."""
    (folder / "train.jsonl").write_text("".join(TASKS[:4]))
    (folder / "val.jsonl").write_text("".join(TASKS[4:6]))
    command = [sys.executable, "-m", "examples.math.train_framework_agent", *arguments]
    command += ["--train", "train.jsonl", "--val", "val.jsonl"]
    known = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True, timeout=350, check=False)


async def test_the_script_trains_to_its_end(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["step"] for row in rows if row.get("val_reward") is not None] == [0, 2]
    assert sum(row.get("failed", 0) for row in rows) == 0
    assert sum(row.get("tokens", 0) for row in rows) > 0
    assert "rollout.gpu_memory_utilization:" in done.stderr, "what has no meaning is listed"
    store = SqliteLightningStore(folder / "store.db")
    try:
        rollouts = list(await store.query_rollouts(limit=-1))
        names = {span.name for r in rollouts for span in await store.query_spans(r.rollout_id, limit=-1)}
        calls = await store.query_calls([r.rollout_id for r in rollouts])
    finally:
        await store.close()
    assert len(rollouts) == 2 * 4 * 4 + 2 * 2
    assert {"invoke_agent MathAgent", "execute_tool calc"} <= names, "spans of the framework, by its own tracer"
    assert {call.info.agent for found in calls.values() for call in found} == {"MathAgent"}
    assert {call.info.dialect for found in calls.values() for call in found} == {"responses"}


def test_debug_runs_the_agent_alone(tmp_path: Path) -> None:
    with served(tmp_path) as url:
        done = run(tmp_path, "--debug", OPENAI_BASE_URL=url, OPENAI_MODEL="policy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Reward: " in done.stdout
    assert not (tmp_path / "runs").exists()


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The calc model by `agl serve`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "agentlightning", "serve", "calc", "--port", str(port)]
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}/v1"
    try:
        deadline = time.monotonic() + 150
        while not _answers(f"{url}/models"):
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.2)
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5):
            return True
    except (URLError, OSError):
        return False
