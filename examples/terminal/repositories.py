"""Small repositories with one fault each, from a seed.

    python -m examples.terminal.repositories data/terminal

writes train.jsonl, val.jsonl and test.jsonl. A line is a task: the repository's `files`, the `issue` that the agent is
given, the `module` that it is to mend, and `hidden` tests of it, which it never sees: [function, argument, value] each.
Tasks of your own are lines like these.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .grammar import KINDS, MODULES, NUMBERS

SIZES = {"train": 600, "val": 40, "test": 200}
FUNCTIONS = 3
HIDDEN = 6
"""Hidden tests of each function."""
LARGEST = 9
ISSUE = "python3 check.py fails."
CHECK = '''"""The tests: python3 check.py"""

import {module}

TESTS = [
{tests}
]
for name, given, right in TESTS:
    found = getattr({module}, name)(given)
    if found != right:
        raise SystemExit(f"{module}.{{name}}({{given}}) gives {{found}}, not {{right}}")
print("All tests pass.")
'''

Test = list[Any]
"""[function, argument, value]"""


@dataclass(frozen=True)
class Function:
    """A function of a module, with the part of it that may be wrong."""

    kind: str
    number: int
    part: str


@dataclass(frozen=True)
class Repository:
    """A module with a function that is wrong."""

    module: str
    functions: tuple[Function, ...]
    fault: int
    """Which function it is."""

    @property
    def xs(self) -> str:
        """What its lists hold."""
        return MODULES[self.module]

    def right(self, at: int) -> str:
        """The part that belongs there."""
        function = self.functions[at]
        return KINDS[function.kind].right.format(xs=self.xs, n=function.number)

    def wrong(self, at: int) -> list[str]:
        """Parts that do not."""
        function = self.functions[at]
        return [part.format(xs=self.xs, n=function.number) for part in KINDS[function.kind].wrong]

    def returned(self, at: int, part: str) -> str:
        """What the function returns with this part."""
        return KINDS[self.functions[at].kind].returns.replace("{xs}", self.xs).replace("{}", part)

    def source(self) -> str:
        """The module."""
        return "\n\n".join(self._written(at, function) for at, function in enumerate(self.functions))

    def _written(self, at: int, function: Function) -> str:
        words = KINDS[function.kind].words.format(xs=self.xs, n=function.number)
        return f'def {function.kind}({self.xs}):\n    """{words}"""\n    return {self.returned(at, function.part)}\n'

    def with_part(self, part: str) -> Repository:
        """Another part at the place of the fault."""
        functions = list(self.functions)
        functions[self.fault] = replace(functions[self.fault], part=part)
        return replace(self, functions=tuple(functions))


def make_repository(rng: random.Random) -> Repository:
    """One whose faulty part stands at one place, so that its text alone tells where it is."""
    while True:
        kinds = rng.sample(list(KINDS), FUNCTIONS)
        functions = tuple(Function(kind, rng.choice(NUMBERS), "") for kind in kinds)
        made = Repository(rng.choice(list(MODULES)), functions, rng.randrange(FUNCTIONS))
        parts = [made.right(at) for at in range(FUNCTIONS)]
        parts[made.fault] = rng.choice(made.wrong(made.fault))
        made = replace(made, functions=tuple(replace(f, part=p) for f, p in zip(functions, parts, strict=True)))
        if made.source().count(parts[made.fault]) == 1:
            return made


def make_tests(repository: Repository, rng: random.Random) -> list[list[Test]]:
    """Tests of each function: a visible one, which its fault fails, and hidden ones, which everything wrong fails."""
    return [_tests(repository, at, rng) for at in range(FUNCTIONS)]


def _tests(repository: Repository, at: int, rng: random.Random) -> list[Test]:
    name, part = repository.functions[at].kind, repository.functions[at].part
    right, now = (_function(repository, at, p) for p in (repository.right(at), part))
    others = [_function(repository, at, p) for p in repository.wrong(at)]
    while True:
        seen, *hidden = ([rng.randint(1, LARGEST) for _ in range(n)] for n in (3, *[6] * HIDDEN))
        fails = part == repository.right(at) or now(seen) != right(seen)
        if fails and all(any(other(given) != right(given) for given in hidden) for other in others):
            return [[name, given, right(given)] for given in (seen, *hidden)]


def _function(repository: Repository, at: int, part: str) -> Callable[[list[int]], Any]:
    """It is our own expression that is run here, not a model's."""
    return eval(f"lambda {repository.xs}: {repository.returned(at, part)}")


def as_task(repository: Repository, tests: list[list[Test]]) -> dict[str, Any]:
    """The repository as files, with its tests."""
    lines = "\n".join(f"    ({name!r}, {given}, {value})," for (name, given, value), *_ in tests)
    module = f"{repository.module}.py"
    files = {module: repository.source(), "check.py": CHECK.format(module=repository.module, tests=lines)}
    return {"issue": ISSUE, "module": module, "files": files, "hidden": [t for _, *more in tests for t in more]}


def make_tasks(seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """The tasks of each part; no module is in two of them."""
    rng, found = random.Random(f"terminal tasks {seed}"), {}
    while len(found) < sum(SIZES.values()):
        repository = make_repository(rng)
        if repository.source() not in found:
            found[repository.source()] = as_task(repository, make_tests(repository, rng))
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
