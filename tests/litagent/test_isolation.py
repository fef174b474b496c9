"""Programs behind a real gateway: rewards over HTTP, and sandboxes that reach the gateway and nothing else."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import AgentError, ConfigError, JudgeError
from agentlightning.gateway import Gateway
from agentlightning.litagent import Container, LitAgent, Program
from agentlightning.litagent.isolation import ENGINE_VARIABLES, INHERITED
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import DummyTracer
from agentlightning.types import AttemptedRollout, Outcome
from agentlightning.types.reward import find_final_reward
from tests.gateway.conftest import rendering  # noqa: F401
from tests.gateway.scripted import ScriptedEngine


def _bubblewrap_works() -> bool:
    probe = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    return shutil.which("bwrap") is not None and subprocess.run(probe, capture_output=True, check=False).returncode == 0


needs_bubblewrap = pytest.mark.skipif(not _bubblewrap_works(), reason="bubblewrap is not installed, or may not be used")

POST_REWARD = """
import json, os, sys, urllib.request
request = urllib.request.Request(
    os.environ["AGL_REWARD_URL"], json.dumps({"reward": json.load(sys.stdin)}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
print(urllib.request.urlopen(request).status)
"""
ASK = """
import json, os, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "?"}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


class Place:
    """A store, and a gateway that always answers 7."""

    def __init__(self, store: InMemoryLightningStore, gateway: Gateway) -> None:
        self.store = store
        self.gateway = gateway

    async def run(self, agent: LitAgent[Any], task: Any = None) -> AttemptedRollout:
        runner = LitAgentRunner(DummyTracer(), gateway=self.gateway)
        runner.init(agent)
        runner.init_worker(0, self.store)
        try:
            async with asyncio.timeout(60):
                with suppress(AgentError, JudgeError, ValueError):  # how it ended is in the store
                    await runner.step(task, resources={"llm": self.gateway.as_resource()})
            (rollout,) = await self.store.query_rollouts(sort_by="start_time", sort_order="desc", limit=1)
            finished = await self.store.get_rollout_by_id(rollout.rollout_id)
            assert isinstance(finished, AttemptedRollout)
            return finished
        finally:
            runner.teardown()

    async def reward(self, rollout: AttemptedRollout) -> float | None:
        return find_final_reward((await self.store.query_spans(rollout.rollout_id)).items)


@pytest.fixture
async def place(rendering: Any) -> AsyncIterator[Place]:  # noqa: F811
    store = InMemoryLightningStore()
    async with Gateway(store, ScriptedEngine(rendering, lambda prompt, params: "7"), rendering) as gateway:
        yield Place(store, gateway)
    await store.close()


async def test_a_reward_comes_by_http(place: Place) -> None:
    rollout = await place.run(Program([sys.executable, "-S", "-c", POST_REWARD], reward="http"), 0.75)
    assert rollout.attempt.outcome is Outcome.OK, rollout.attempt.error
    assert await place.reward(rollout) == 0.75


async def test_no_reward_by_http_is_an_agent_error(place: Place) -> None:
    rollout = await place.run(Program("true", reward="http"))
    assert rollout.attempt.outcome is Outcome.AGENT_ERROR


@pytest.mark.parametrize("reward", ["NaN", "one", None])
async def test_what_is_no_reward_is_refused(place: Place, reward: Any) -> None:
    rollout = await place.run(Program([sys.executable, "-S", "-c", POST_REWARD], reward="http"), reward)
    assert rollout.attempt.outcome is Outcome.AGENT_ERROR
    assert "400" in (rollout.attempt.error or "")


async def test_a_program_that_is_graded_cannot_reward_itself(place: Place) -> None:
    rollout = await place.run(Program([sys.executable, "-S", "-c", POST_REWARD], grader=lambda run: 0.0), 1.0)
    assert rollout.attempt.outcome is Outcome.AGENT_ERROR
    assert "403" in (rollout.attempt.error or "")
    assert await place.reward(rollout) is None


@needs_bubblewrap
async def test_a_program_in_bubblewrap_reaches_the_gateway(place: Place) -> None:
    rollout = await place.run(Program([sys.executable, "-S", "-c", ASK], isolation="bubblewrap"))
    assert rollout.attempt.outcome is Outcome.OK, rollout.attempt.error
    assert await place.reward(rollout) == 7.0
    assert len((await place.store.query_calls([rollout.rollout_id]))[rollout.rollout_id]) == 1


OTHER_PORT = """
import socket, sys
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=2)
except OSError:
    print(1.0)
else:
    print(0.0)
"""


@needs_bubblewrap
async def test_a_program_in_bubblewrap_reaches_nothing_else(place: Place, tmp_path: Any) -> None:
    other = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    port = str(other.sockets[0].getsockname()[1])
    command = [sys.executable, "-S", "-c", OTHER_PORT, port]
    outside = await place.run(Program(command))
    inside = await place.run(Program(command, isolation="bubblewrap"))
    other.close()
    assert (await place.reward(outside), await place.reward(inside)) == (0.0, 1.0)
    victim = tmp_path / "victim"
    writing = f"touch here; touch {victim} 2>/dev/null; test -e here && echo 1"
    rollout = await place.run(Program(["/bin/sh", "-c", writing], isolation="bubblewrap"))
    assert await place.reward(rollout) == 1.0
    assert not victim.exists()


@needs_bubblewrap
async def test_an_interpreter_in_tmp_is_found(place: Place, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    rollout = await place.run(Program(["/bin/sh", "-c", "echo 1"], isolation="bubblewrap"))
    assert await place.reward(rollout) == 1.0, rollout.attempt.error


@needs_bubblewrap
async def test_exit_codes_and_signals_come_through_the_sandbox(place: Place) -> None:
    rollout = await place.run(Program(["/bin/sh", "-c", "exit 3"], isolation="bubblewrap"))
    assert "exit code 3" in (rollout.attempt.error or "")


async def test_a_container_command_gets_workspace_and_environment(place: Place, tmp_path: Any) -> None:
    # Stands in for docker: checks its arguments, then runs the rest here.
    fake = tmp_path / "docker"
    fake.write_text(
        '#!/bin/sh\ntest "$1" = run && test "$2" = -w && test "$3" = "$PWD" && test "$4" = --env || exit 9\n'
        'while [ "$1" != image ]; do shift; done; shift; exec "$@"\n'
    )
    fake.chmod(0o755)
    removed = tmp_path / "removed"
    container = Container([str(fake), "run", "-w", "{workspace}", "{env}", "image"], ["touch", f"{removed}-{{name}}"])
    rollout = await place.run(Program([sys.executable, "-S", "-c", ASK], isolation=container))
    assert await place.reward(rollout) == 7.0, rollout.attempt.error
    assert len(list(tmp_path.glob("removed-agl-*"))) == 1


async def test_our_environment_concerns_the_engines_client_alone(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ENGINE_VARIABLES:
        monkeypatch.setenv(name, f"of {name}")
    client = tmp_path / "docker"  # its own environment and its arguments, and then what it ran
    seen = "".join(f'test "${name}" = "of {name}" || exit 9\n' for name in ENGINE_VARIABLES)
    passed = "|".join(f'*"--env {name} "*' for name in (*ENGINE_VARIABLES, *INHERITED))
    seen += f'test "$PATH" = "{os.environ["PATH"]}" || exit 7\n'
    client.write_text(f'#!/bin/sh\n{seen}case "$* " in {passed}) exit 8;; esac\necho 1\n')
    client.chmod(0o755)
    container = Container([str(client), "run", "{env}", "image"])
    rollout = await place.run(Program(["true"], isolation=container))
    assert await place.reward(rollout) == 1.0, rollout.attempt.error
    rollout = await place.run(Program(["true"], isolation=container, env={"DOCKER_HOST": "another"}))
    assert "exit code 9" in (rollout.attempt.error or "")


def test_an_unknown_isolation_is_refused() -> None:
    with pytest.raises(ConfigError, match="isolation"):
        Program("true", isolation="jail")  # pyright: ignore[reportArgumentType]
