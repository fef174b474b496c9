"""The agents that have a name, as they are installed: each works with what `agl agents` says of it, token for token."""

from __future__ import annotations

import os
import runpy
import shutil
from pathlib import Path

import pytest

from agentlightning.litagent.known_agents import KNOWN_AGENTS
from tests.clients import node

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "agents.py"))
pytestmark = [pytest.mark.clients, pytest.mark.timeout(240), pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("name", KNOWN_AGENTS)
async def test_an_agent_works_as_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{node.HOME / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}")
    if shutil.which(KNOWN_AGENTS[name].program) is None:
        pytest.skip(f"not installed here: {KNOWN_AGENTS[name].install}")
    seen = await SCRIPT["run"](KNOWN_AGENTS[name])
    assert seen.worked, (seen.error, seen.output[-2000:])
    assert len(seen.later) >= (1 if "aider" not in name else 0)
    assert seen.exact == len(seen.later), [call.info.divergence for call in seen.later]
