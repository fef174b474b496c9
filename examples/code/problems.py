"""Problems: a function of a list of numbers in words, an expression that is one, and tests that are seen or hidden.

    python -m examples.code.problems data/code

writes train.jsonl, val.jsonl and test.jsonl. A line is a task: what f is to do, and lists of [input, value], `tests`
that the agent can run and `hidden` ones that it is rewarded by. Tasks of your own are lines like these.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZES = {"train": 1000, "val": 60, "test": 200}
TESTS, HIDDEN = 2, 8
LENGTH = 5
"""Numbers in an input."""


@dataclass(frozen=True)
class Part:
    """A part of a problem: in words, and in Python."""

    words: str
    python: str


ENDS = (
    Part("the sum of", "sum({})"),
    Part("the largest of", "max({})"),
    Part("the smallest of", "min({})"),
    Part("in order,", "sorted({})"),
    Part("a list of", "list({})"),
)


@dataclass(frozen=True)
class Problem:
    """What is done with the numbers of xs: which are kept, what becomes of each, and of all."""

    end: Part
    keep: Part
    change: Part

    def words(self) -> str:
        return f"{self.end.words} {self.keep.words}{self.change.words}"

    def code(self) -> str:
        condition = f" if {self.keep.python}" if self.keep.python else ""
        return f"def f(xs): return {self.end.python.format(f'{self.change.python} for x in xs{condition}')}"


def make_problem(rng: random.Random) -> Problem:
    """One of 1,805."""
    return Problem(rng.choice(ENDS), rng.choice(KEEPS)(rng), rng.choice(CHANGES)(rng))


def solve(problem: Problem) -> Callable[[list[int]], Any]:
    """The function. It is our own expression that is run here, not a model's."""
    names: dict[str, Any] = {}
    exec(problem.code(), names)
    return names["f"]


def as_task(problem: Problem, rng: random.Random) -> dict[str, Any]:
    """The problem with tests, on inputs that have something to keep."""
    function, pairs = solve(problem), []
    while len(pairs) < TESTS + HIDDEN:
        numbers = [rng.randint(-9, 20) for _ in range(LENGTH)]
        try:
            pairs.append([numbers, function(numbers)])
        except ValueError:  # the largest of none
            continue
    return {"problem": problem.words(), "tests": pairs[:TESTS], "hidden": pairs[TESTS:]}


def make_tasks(seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """The tasks of each part; no problem is in two of them."""
    rng, found = random.Random(f"code tasks {seed}"), {}
    while len(found) < sum(SIZES.values()):
        problem = make_problem(rng)
        if problem.words() not in found:
            found[problem.words()] = as_task(problem, rng)
    left = iter(found.values())
    return {part: [next(left) for _ in range(size)] for part, size in SIZES.items()}


def _simple(words: str, python: str) -> Callable[[random.Random], Part]:
    return lambda rng: Part(words, python)


def _with_number(words: str, python: str) -> Callable[[random.Random], Part]:
    def part(rng: random.Random) -> Part:
        number = rng.randint(2, 9)
        return Part(words.format(number), python.format(number))

    return part


KEEPS: tuple[Callable[[random.Random], Part], ...] = (
    _simple("the numbers", ""),
    _simple("the even numbers", "x % 2 == 0"),
    _simple("the odd numbers", "x % 2 == 1"),
    _with_number("the numbers above {}", "x > {}"),
    _with_number("the numbers below {}", "x < {}"),
)
CHANGES: tuple[Callable[[random.Random], Part], ...] = (
    _simple("", "x"),
    _simple(", each squared", "x * x"),
    _simple(", each negated", "-x"),
    _with_number(", each plus {}", "x + {}"),
    _with_number(", each times {}", "x * {}"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for part, tasks in make_tasks(given.seed).items():
        (given.folder / f"{part}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        print(f"{given.folder / part}.jsonl: {len(tasks)} tasks")


if __name__ == "__main__":
    main()
