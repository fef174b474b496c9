"""What the sub-agent's small model is taught: the last line of a function from its docstring, right and wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from agentlightning.trainer.example import load_example

from .planner import function_of

_tools: Any = load_example("tools", "demonstration")
_prompts: Any = load_example("terminal", "prompts")
_repositories: Any = load_example("terminal", "repositories")

SKILL, MIXED = {"right": 0.97}, {"right": 0.4}
"""How often the line is right; else it is one that the repositories have as a fault."""


def course() -> Any:
    """What the model is taught, for examples/tools."""
    make: Any = load_example("tools", "make_model")
    return make.Course(
        demonstrate, SKILL, MIXED, measure, vocabulary=448, skill_steps=160, mixed_steps=40, batch=32, positions=256
    )


def demonstrate(rng: random.Random, weights: Mapping[str, float]) -> Any:
    """A function with a fault, and what is said of it."""
    repository = _repositories.make_repository(rng)
    right = rng.random() < weights["right"]
    return _tools.Demonstration(asked(repository), (said(repository, right, rng),))


def asked(repository: Any) -> list[dict[str, str]]:
    """What Codex sends for its sub-agent, which has no tools."""
    kind = repository.functions[repository.fault].kind
    messages: list[dict[str, str]] = _prompts.conversation(function_of(repository.source(), kind))
    return messages


def said(repository: Any, right: bool, rng: random.Random) -> str:
    """The line that belongs there, or one that does not."""
    at = repository.fault
    part = repository.right(at) if right else rng.choice(repository.wrong(at))
    return f"return {repository.returned(at, part)}"


def measure(model: Any, renderer: Any, tasks: int = 100) -> str:
    """How often it says the right line, sampled at temperature 1."""
    rng = random.Random("measure")
    repositories = [_repositories.make_repository(rng) for _ in range(tasks)]
    answers = load_example("tools", "batch").Batch(model, renderer).ask([asked(r) for r in repositories])
    right = sum(answer == said(r, True, rng) for answer, r in zip(answers, repositories, strict=True))
    return f"right {right / tasks:.1%}"
