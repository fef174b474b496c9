"""How often a model solves problems, in this process: for measuring it while making it. Its code is sandboxed."""

from __future__ import annotations

import asyncio
from typing import Any

from agentlightning.trainer.example import load_example

from .code_agent import MAX_TOKENS, MAX_TURNS, earned
from .grading import code_block, tried
from .problems import make_tasks
from .prompts import NO_CODE, TEST_TOOL, conversation


def measure(model: Any, renderer: Any, tasks: int = 100) -> str:
    """The share of problems solved, sampled at temperature 1, and what the agent reports beside it."""
    given = make_tasks()["test"][:tasks]
    batch = load_example("tools", "batch").Batch(model, renderer)
    tested: list[list[str]] = [[] for _ in given]

    async def carry_out(i: int, arguments: Any) -> str:
        code = arguments.get("code") if isinstance(arguments, dict) else None
        if not isinstance(code, str):
            return NO_CODE
        tested[i].append(code)
        return await tried(code, given[i]["tests"])

    async def play() -> list[dict[str, float]]:
        conversations = [conversation(task["problem"]) for task in given]
        said = await batch.converse(conversations, [TEST_TOOL], carry_out, turns=MAX_TURNS, max_tokens=MAX_TOKENS)
        return [await earned(tested[i], code_block(said[i]), task) for i, task in enumerate(given)]

    rewards = asyncio.run(play())
    shares = []
    for name in ("correct", "first", "tested", "repaired"):
        values = [reward[name] for reward in rewards if name in reward]
        shares.append(f"{name} {sum(values) / max(1, len(values)):.1%}")
    return ", ".join(shares)
