"""What goes wrong for users ends in one clear message with the next step."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.typed import typed

AGENT = """
import asyncio, agentlightning as agl
from agentlightning.metrics import SilentConsole
@agl.rollout
async def agent(task, llm):
    {body}
algorithm = agl.GRPO(model="calc", steps=2, tasks_per_step=2, group_size=2, max_context=512)
try:
    agl.Trainer(algorithm=algorithm, run_dir="run", console=SilentConsole()).fit(agent, [1, 2, 3, 4])
except agl.AgentLightningError as error:
    print(type(error).__name__, error)
"""

SWALLOWS = """
    from openai import AsyncOpenAI
    client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0)
    try:
        await client.chat.completions.create(model=llm.model, messages=[], temperature=99)
    except Exception:
        return float(task % 2)
"""


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return typed(cwd, *command, timeout=120, environment=environment)


def fails_with(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """One message, no traceback, and the parts are in it."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in " ".join(done.stderr.split()), done.stderr


def test_a_model_that_does_not_exist(tmp_path: Path) -> None:
    done = run("-m", "agentlightning", "demo", "calc", "--model", "./no-such-model", cwd=tmp_path)
    fails_with(done, "There is no model at './no-such-model'", "calc")


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    done = run("-m", "agentlightning", "demo", "calc", "--model", str(tmp_path), cwd=tmp_path)
    fails_with(done, "holds no model", "config.json")


def test_a_hub_id_that_cannot_be_reached(tmp_path: Path) -> None:
    done = run("-m", "agentlightning", "demo", "calc", "--model", "nobody/nothing", cwd=tmp_path)
    fails_with(done, "nobody/nothing", "could not be loaded")


@pytest.mark.slow
def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("-m", "agentlightning", "demo", "calc", "--port", port, cwd=tmp_path)
    fails_with(done, port)


@pytest.mark.own_model_process
def test_torch_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        "sys.modules['torch'] = None\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'torch' else found(name, *a)\n"
    )
    done = run("-m", "agentlightning", "demo", "calc", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    fails_with(done, "torch", "pip install -e '", "[torch]'")


def test_an_unknown_example(tmp_path: Path) -> None:
    fails_with(run("-m", "agentlightning", "demo", "chess", cwd=tmp_path), "There is no example 'chess'", "calc")


def test_nothing_to_resume(tmp_path: Path) -> None:
    done = run("-m", "agentlightning", "demo", "calc", "--resume", str(tmp_path), cwd=tmp_path)
    fails_with(done, "There is no checkpoint to resume from")


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    done = run("-m", "agentlightning", "demo", "calc", "--run-dir", str(tmp_path), cwd=tmp_path)
    fails_with(done, "holds a run already", "resume=")
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n'


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        slow("raise ValueError('my bug')", ["AgentError There is nothing to learn from", "4 of 4 (100%)", ": my bug"]),
        slow("return float(task % 2)", ["AgentError The agent never called the model", "base_url=llm.endpoint"]),
        (
            SWALLOWS,
            ["AgentError No model call of the agent was answered: 4 arrived at", "(4×): 'messages' is empty"],
        ),
        slow("return None", ["AgentError There is nothing to learn from", "4 of 4 (100%)", "emitted no reward"]),
    ],
    ids=["raises", "never calls the model", "is refused", "returns nothing"],
)
def test_an_agent_that_teaches_nothing(tmp_path: Path, body: str, parts: list[str]) -> None:
    done = run("-c", AGENT.format(body=body), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in parts:
        assert part in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
