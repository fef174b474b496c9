"""The example agent's one client is closed where it was used, before the process ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import pytest

from agentlightning.runner.executor import agent_loop


@pytest.fixture(scope="session", autouse=True)
def close_the_example_client() -> Iterator[None]:
    yield
    module = sys.modules.get("agl_example_calc.calc_agent")
    if module is not None:
        asyncio.run(agent_loop().run(module.client.close()))
