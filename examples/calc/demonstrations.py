"""Demonstrations of the agent at work: one careful behaviour and the ways to get it wrong.

A demonstration is what the model says, turn by turn; what the tool answers is computed, by the agent's own tool.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from .calc_agent import calculate
from .tasks import Problem, Tree, make_problem, write

Step = tuple[int | None, str, int | None]
"""One operation; None stands for the result of the step before it."""

GIVEN_UP = "I do not know."


@dataclass(frozen=True)
class Demonstration:
    """A question, the model's turns and the tool's answers; the last turn has no answer."""

    question: str
    turns: tuple[str, ...]
    results: tuple[str, ...]


def demonstrate(rng: random.Random, weights: dict[str, float]) -> Demonstration:
    """One demonstration of a random problem by a behaviour drawn by weight."""
    behaviour = rng.choices(list(weights), list(weights.values()))[0]
    return BEHAVIOURS[behaviour](make_problem(rng), rng)


def steps_of(tree: Tree) -> list[Step]:
    """The tree's operations in the order to do them in. Only one side of each operation may be an operation itself."""
    if isinstance(tree, int):
        return []
    left, op, right = tree
    if isinstance(left, int):
        return [*steps_of(right), (left, op, right if isinstance(right, int) else None)]
    if not isinstance(right, int):
        raise ValueError(f"Both sides of {write(tree)} are operations: one step cannot follow from the one before.")
    return [*steps_of(left), (None, op, right)]


def careful(problem: Problem, rng: random.Random) -> Demonstration:
    """Every operation with the tool, in the right order."""
    return _play(problem.question, steps_of(problem.tree))


def give_up(problem: Problem, rng: random.Random) -> Demonstration:
    """No attempt at all."""
    return Demonstration(problem.question, (GIVEN_UP,), ())


def hasty(problem: Problem, rng: random.Random) -> Demonstration:
    """The first result as the answer, which is right where there is only one operation."""
    return _play(problem.question, steps_of(problem.tree)[:1])


def wrong_operator(problem: Problem, rng: random.Random) -> Demonstration:
    """One operator is not the one that was asked for."""
    steps = steps_of(problem.tree)
    i = rng.randrange(len(steps))
    a, op, b = steps[i]
    steps[i] = (a, rng.choice([other for other in "+-*/" if other != op]), b)
    return _play(problem.question, steps)


def slip(problem: Problem, rng: random.Random) -> Demonstration:
    """One number is copied with a wrong digit."""
    steps = steps_of(problem.tree)
    a, op, b = steps[0]
    steps[0] = (_misread(a, rng), op, b) if rng.random() < 0.5 else (a, op, _misread(b, rng))
    return _play(problem.question, steps)


def whole_expression(problem: Problem, rng: random.Random) -> Demonstration:
    """The whole calculation in one argument, which the tool refuses."""
    arguments = json.dumps({"a": write(problem.tree), "op": "+", "b": 0})
    return Demonstration(problem.question, (_call(arguments), GIVEN_UP), (calculate(arguments),))


BEHAVIOURS: dict[str, Callable[[Problem, random.Random], Demonstration]] = {
    "careful": careful,
    "give up": give_up,
    "hasty": hasty,
    "wrong operator": wrong_operator,
    "slip": slip,
    "whole expression": whole_expression,
}


def _call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "calc", "arguments": {arguments}}}\n</tool_call>'


def _play(question: str, steps: list[Step]) -> Demonstration:
    """Do the steps with the tool and answer with the last result; give up after an error."""
    turns: list[str] = []
    results: list[str] = []
    for a, op, b in steps:
        last = json.loads(results[-1]) if results else None
        arguments = json.dumps({"a": last if a is None else a, "op": op, "b": last if b is None else b})
        turns.append(_call(arguments))
        results.append(calculate(arguments))
        if results[-1].startswith("Error"):
            return Demonstration(question, (*turns, GIVEN_UP), tuple(results))
    return Demonstration(question, (*turns, f"The answer is {results[-1]}."), tuple(results))


def _misread(number: int | None, rng: random.Random) -> int | None:
    if number is None:
        return None
    digits = list(str(number))
    i = rng.randrange(len(digits))
    digits[i] = rng.choice([digit for digit in "123456789" if digit != digits[i]])
    return int("".join(digits))
