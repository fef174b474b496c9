"""Agents that have a name: what their programs are given, seen by a program that stands in their place."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError
from agentlightning.litagent.known_agents import KNOWN_AGENTS, KnownAgent
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Outcome
from tests.typed import typed

PROMPT = '--version; say "it\'s" $HOME {task.x}\n'
SHOWS = f"""#!{sys.executable}
import json, os, pathlib, sys
shown = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "stdin": sys.stdin.read()}}
pathlib.Path("shown.json").write_text(json.dumps(shown))
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in PATH with a program for each agent."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for agent in KNOWN_AGENTS.values():
        program = folder / agent.program
        program.write_text(SHOWS)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


@pytest.mark.parametrize("agent", KNOWN_AGENTS.values(), ids=list(KNOWN_AGENTS))
async def test_an_agent_is_started_on_its_task_and_told_of_the_model(agent: KnownAgent, installed: Path) -> None:
    seen: list[dict[str, Any]] = []

    def grade(run: agl.ProgramRun) -> float:
        seen.append(json.loads((run.workspace / "shown.json").read_text()))
        return 1.0

    store = InMemoryLightningStore()
    runner = LitAgentRunner(agl.DummyTracer())
    runner.init(agl.Program(agent.name, grader=grade, env={"MINE": "1"}))
    runner.init_worker(0, store)
    llm = agl.LLM(endpoint="http://127.0.0.1:9/v1", model="some-model", api_key="sk-1")
    rollout = await runner.step({"prompt": PROMPT}, resources={"llm": llm})
    runner.teardown()
    assert rollout.attempt.outcome is Outcome.OK, rollout.attempt.error
    (shown,) = seen
    assert sum(PROMPT in argument for argument in shown["arguments"]) == 1
    (given,) = [a for a in shown["arguments"] if PROMPT in a]
    assert given != PROMPT or shown["arguments"][-2] == "--", "it cannot be taken for an option"
    assert (shown["environment"]["MINE"], shown["stdin"]) == ("1", "")
    assert shown["environment"]["HOME"] != os.environ["HOME"]
    everything = json.dumps(shown, ensure_ascii=False)
    assert "{llm." not in everything
    assert "some-model" in everything, "the model is named"


def test_an_agent_that_prints_no_reward_needs_a_grader() -> None:
    with pytest.raises(ConfigError, match="--grader"):
        agl.Program("codex")
    agl.Program("codex", reward="file")


@pytest.mark.slow
def test_the_list_says_what_is_installed(installed: Path, tmp_path: Path) -> None:
    command = ("-m", "agentlightning", "agents")
    (installed / "codex").write_text("#!/bin/sh\necho codex-cli 0.169.0\n")
    (installed / "aider").unlink()
    found = {row["name"]: row["installed"] for row in json.loads(typed(tmp_path, *command, "--json").stdout)}
    assert (found["codex"], found["claude-code"], set(found)) == ("0.169.0", "yes", set(KNOWN_AGENTS))
    assert "codex" in typed(tmp_path, *command).stdout


def test_the_versions_that_were_tested_are_those_of_the_matrix() -> None:
    """`python scripts/agents.py --write` runs them: one truth in two places."""
    page = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
    table = page.partition("<!-- agents:")[2].partition("<!-- /agents -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines() if line.startswith("| ")]
    assert dict(rows[1:]) == {agent.name: agent.tested for agent in KNOWN_AGENTS.values()}
