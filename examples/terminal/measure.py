"""How often a model mends modules, in this process: for measuring it while making it. Its code is run in a sandbox."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from agentlightning.trainer.example import load_example

from .grading import score, values_of
from .prompts import TOOLS, conversation, shown
from .repositories import ISSUE, make_repository, make_tests
from .simulated import CHECK, run, verdict

TURNS, MAX_TOKENS = 10, 96


def measure(model: Any, renderer: Any, tasks: int = 100) -> str:
    """The share of modules that pass their hidden tests, sampled at temperature 1, and what was done for it."""

    rng = random.Random("measure")
    repositories = [make_repository(rng) for _ in range(tasks)]
    tests = [make_tests(repository, rng) for repository in repositories]
    sources = [repository.source() for repository in repositories]
    done: list[list[str]] = [[] for _ in repositories]
    batch = load_example("tools", "batch").Batch(model, renderer)

    async def carry_out(i: int, arguments: Any) -> str:
        command = str(arguments.get("cmd", "")) if isinstance(arguments, dict) else ""
        done[i].append(command)
        module = f"{repositories[i].module}.py"
        if command == CHECK:
            visible = [t[0] for t in tests[i]]
            answer = await values_of(sources[i], visible)
            ended = verdict(module, visible, answer.values) if answer.error is None else (f"{answer.error}\n", 1)
        else:
            ended, sources[i] = run(command, module, sources[i])
        return shown(*ended)

    async def play() -> list[float]:
        await batch.converse([conversation(ISSUE)] * tasks, TOOLS, carry_out, turns=TURNS, max_tokens=MAX_TOKENS)
        hidden = [[t for _, *more in found for t in more] for found in tests]
        return [await score(source, more) for source, more in zip(sources, hidden, strict=True)]

    rewards = asyncio.run(play())
    commands = [command.split()[0] for told in done for command in told if command]
    counts = ", ".join(f"{name} {commands.count(name) / tasks:.2f}" for name in ("python3", "grep", "sed"))
    return f"mended {sum(rewards) / tasks:.1%}, commands each: {counts}"
