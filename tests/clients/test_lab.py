"""Microsoft's agent-framework-lab as documented: its tracer, `VERL(config)`, dummy keys, `--debug`, unmodified."""

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

SCRIPT = Path(__file__).parent / "lab" / "train_math_agent.py"
TASKS = Path(__file__).parents[2] / "examples" / "programs" / "one_step.jsonl"


@pytest.fixture(autouse=True)
def installed() -> None:
    try:
        version("agent-framework-lab")
    except PackageNotFoundError:
        pytest.skip("not installed here: agent-framework-lab")


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments, str(TASKS)]
    known = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True, timeout=350, check=False)


async def test_the_documented_script_trains_to_its_end(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["val_reward"] is not None for row in rows)
    assert sum(row.get("failed", 0) for row in rows) == 0
    assert sum(row.get("tokens", 0) for row in rows) > 0
    assert "trainer.val_before_train:" in done.stderr, "what has no meaning is listed"
    store = SqliteLightningStore(folder / "store.db")
    try:
        rollouts = list(await store.query_rollouts(limit=-1))
        names = {span.name for r in rollouts for span in await store.query_spans(r.rollout_id, limit=-1)}
        calls = await store.query_calls([r.rollout_id for r in rollouts])
    finally:
        await store.close()
    assert len(rollouts) == 2 * 8 + 3 * 2
    assert {"invoke_agent MathAgent", "execute_tool calc"} <= names, "spans of the framework, by its own tracer"
    assert {call.info.agent for found in calls.values() for call in found} == {"MathAgent"}


def test_debug_runs_the_agent_alone(tmp_path: Path) -> None:
    with served(tmp_path) as url:
        done = run(tmp_path, "--debug", OPENAI_BASE_URL=url, OPENAI_MODEL="policy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reward " in done.stdout
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
