"""The framework's agent of the guide, as it stands on its page, with the real package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentlightning.gateway import Gateway
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Outcome
from tests.clients.conftest import World, carried_out
from tests.clients.test_clients import TASKS

GUIDE = Path(__file__).parents[2] / "docs" / "bring-your-own.md"
pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("default"),  # other people's packages
]


async def test_the_agent_of_the_guide_learns_from_its_own_tokens(world: World) -> None:
    pytest.importorskip("pydantic_ai")
    (section,) = re.findall(r"^## A framework's agent\n(.*?)^## ", GUIDE.read_text(), flags=re.MULTILINE | re.DOTALL)
    (code,) = re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "agent_of_the_page"}
    exec(compile(code, str(GUIDE), "exec"), names)
    store = InMemoryLightningStore()
    gateway = Gateway(store, world.real, world.rendering, train_sampling={"temperature": 0.0})
    run = await carried_out(names["agent"], TASKS, world.real, store, gateway)
    errors = {r.attempt.error for r in run.rollouts if r.attempt.outcome is not Outcome.OK}
    assert not errors, errors
    assert len(run.all_calls()) == run.exact() >= len(TASKS)
