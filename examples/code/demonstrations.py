"""Demonstrations of the coding agent at work, for the small model of this example: well done and badly done.

No problem of validation or test is among them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from agentlightning.trainer.example import load_example

from .grading import verdict
from .grammar import KINDS, Part
from .problems import Problem, as_task, make_problem, make_tasks
from .prompts import PASSED, TEST_TOOL, conversation
from .sandbox import Answer

_tools: Any = load_example("tools", "demonstration")

SKILL = {"tested": 0.95, "runs": 0.98, "right": 0.7, "repairs": 0.95, "mended": 0.9}
MIXED = {"tested": 0.65, "runs": 0.85, "right": 0.12, "repairs": 0.5, "mended": 0.5}
"""How often code is tested before it is handed in, and is code that runs, and the right one; how often tests that fail
lead to another attempt, and that attempt is right.
"""
END = "Done."
SWAPS = ((" > ", " < "), (" == 0", " == 1"), (" in x", " not in x"), ("startswith", "endswith"))
"""What is mistaken for the other in a condition."""
MOST_RUNS = 3


def course() -> Any:
    """What the model is taught, for examples/tools."""
    from .measure import measure  # torch is loaded only where a model is made

    return load_example("tools", "make_model").Course(demonstrate, SKILL, MIXED, measure, skill_steps=400)


def demonstrate(rng: random.Random, weights: Mapping[str, float]) -> Any:
    """A problem, and what is made of it."""
    problem = make_problem(rng)
    while problem.words() in held_out():
        problem = make_problem(rng)
    task = as_task(problem, rng)
    messages, code = conversation(task["problem"]), _written(problem, rng, weights["runs"], weights["right"])
    if rng.random() >= weights["tested"]:
        return _tools.Demonstration(messages, (block(code),), (), [TEST_TOOL])
    turns, results = [call(code)], [run_here(code, task["tests"])]
    while results[-1] != PASSED and len(turns) < MOST_RUNS and rng.random() < weights["repairs"]:
        code = _written(problem, rng, weights["runs"], weights["mended"])
        turns.append(call(code))
        results.append(run_here(code, task["tests"]))
    return _tools.Demonstration(messages, (*turns, END), tuple(results), [TEST_TOOL])


def _written(problem: Problem, rng: random.Random, runs: float, right: float) -> str:
    """Code that may be wrong, and may not even run."""
    code = problem.code() if rng.random() < right else rng.choice(spoiled(problem))
    return code if rng.random() < runs else code[:-1]


def spoiled(problem: Problem) -> list[str]:
    """The code with one thing wrong: all items are kept, or others are, none is changed, or the end is another."""
    kind = KINDS[problem.kind]
    ends = list(kind.ends)
    others = [
        replace(problem, keep=Part("", "")),
        replace(problem, keep=_swapped(problem.keep)),
        replace(problem, change=Part("", "x")),
        replace(problem, end=ends[(ends.index(problem.end) + 1) % len(ends)]),
    ]
    right = problem.code()
    return [other.code() for other in others if other.code() != right]


def _swapped(keep: Part) -> Part:
    for one, other in (*SWAPS, *((b, a) for a, b in SWAPS)):
        if one in keep.python:
            return Part("", keep.python.replace(one, other))
    return keep


def call(code: str) -> str:
    """A tool call as the model writes it."""
    return f'<tool_call>\n{{"name": "run_tests", "arguments": {json.dumps({"code": code})}}}\n</tool_call>'


def block(code: str) -> str:
    """Code in a last message."""
    return f"```python\n{code}\n```"


def run_here(code: str, tests: list[Any]) -> str:
    """What the tool answers. The code is ours, so it needs no sandbox."""
    names: dict[str, Any] = {}
    try:
        exec(code, names)
        answer = Answer([names["f"](given) for given, _ in tests])
    except (SyntaxError, ValueError) as error:
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        answer = Answer([], f"{type(error).__name__}: {said}")
    return verdict(answer, tests)


@cache
def held_out() -> frozenset[str]:
    """The problems of all tasks that are not for training."""
    tasks = make_tasks()
    return frozenset(task["problem"] for part in ("val", "test") for task in tasks[part])
