# pyright: basic, reportMissingImports=false
"""Environments of OpenEnv for the tests, where it is installed: `uvicorn openenv_app:guess`, `:pair` or `:tools`."""

from __future__ import annotations

import random
from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: int


class Pair(Action):
    first: int
    second: int


class Hint(Observation):
    hint: str = ""


class GuessEnvironment(Environment):
    """Guess a number from 1 to 10, which the seed decides, in five tries."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self.number, self.left = random.Random(seed).randint(1, 10), 5
        return Hint(hint="Guess a number from 1 to 10.", done=False, reward=None)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self.left -= 1
        if action.guess == self.number:
            return Hint(hint="Right.", done=True, reward=1.0)
        return Hint(hint="higher" if action.guess < self.number else "lower", done=not self.left, reward=0.0)

    @property
    def state(self) -> State:
        return State()


class PairEnvironment(GuessEnvironment):
    """Say two numbers whose sum is ten; more than 100 breaks it."""

    def step(self, action: Pair, timeout_s: float | None = None, **_: Any) -> Hint:  # type: ignore[override]
        if action.first > 100:
            raise RuntimeError("too large")
        return Hint(hint="", done=True, reward=float(action.first + action.second == 10))


class ToolsEnvironment(MCPEnvironment):
    """Put two numbers together by a tool; the right sum earns 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("tools")

        @mcp.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(mcp)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        return Observation(done=False, reward=None)

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        return Observation(done=False, reward=0.0)

    async def step_async(self, action: Action, timeout_s: float | None = None, **given: Any) -> Observation:
        seen = await super().step_async(action, timeout_s=timeout_s, **given)
        if isinstance(action, CallToolAction):
            right = action.tool_name == "add" and sum(action.arguments.values()) == 5
            seen.reward, seen.done = float(right), right
        return seen

    @property
    def state(self) -> State:
        return State()


guess = create_app(GuessEnvironment, Guess, Hint, env_name="guess", max_concurrent_envs=4)
pair = create_app(PairEnvironment, Pair, Hint, env_name="pair", max_concurrent_envs=4)
tools = create_app(ToolsEnvironment, CallToolAction, CallToolObservation, env_name="tools", max_concurrent_envs=4)
