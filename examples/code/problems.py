"""Problems: a function of a list in words, an expression that is one, and tests that are seen or hidden.

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

from .grammar import KINDS, Part

SIZES = {"train": 1000, "val": 60, "test": 200}
TESTS, HIDDEN = 2, 8
LENGTH, HIDDEN_LENGTH = 4, 12
"""Numbers or words in an input; long ones tell `x > 7` from `x > 8`."""


@dataclass(frozen=True)
class Problem:
    """What is done with the items of xs: which are kept, what becomes of each, and of all."""

    kind: str
    end: Part
    keep: Part
    change: Part

    def words(self) -> str:
        return f"{self.end.words} {self.keep.words}{self.change.words}"

    def code(self) -> str:
        condition = f" if {self.keep.python}" if self.keep.python else ""
        return f"def f(xs): return {self.end.python.format(f'{self.change.python} for x in xs{condition}')}"


def make_problem(rng: random.Random) -> Problem:
    """One of 2,525."""
    name = rng.choice(list(KINDS))
    kind = KINDS[name]
    return Problem(name, rng.choice(kind.ends), rng.choice(kind.keeps)(rng), rng.choice(kind.changes)(rng))


def solve(problem: Problem) -> Callable[[list[Any]], Any]:
    """The function. It is our own expression that is run here, not a model's."""
    names: dict[str, Any] = {}
    exec(problem.code(), names)
    return names["f"]


def as_task(problem: Problem, rng: random.Random) -> dict[str, Any]:
    """The problem with tests, on inputs that have something to keep."""
    function, pairs = solve(problem), []
    while len(pairs) < TESTS + HIDDEN:
        length = LENGTH if len(pairs) < TESTS else HIDDEN_LENGTH
        items = [KINDS[problem.kind].item(rng) for _ in range(length)]
        try:
            pairs.append([items, function(items)])
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
