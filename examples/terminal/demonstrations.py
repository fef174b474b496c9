"""Demonstrations of repairs in a terminal, for the small model of this example: well done and badly done.

No module of validation or test is among them.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from agentlightning.trainer.example import load_example

from .grammar import KINDS
from .prompts import TOOLS, call, conversation, shown
from .repositories import ISSUE, Repository, Test, make_repository, make_tasks, make_tests
from .simulated import CHECK, Ended, change, change_of, changed, show, shown_of, verdict

_tools: Any = load_example("tools", "demonstration")

SKILL = {"looks": 0.97, "right": 0.9, "special": 0.0, "checks": 0.9, "mends": 0.95}
MIXED = {"looks": 0.85, "right": 0.45, "special": 0.4, "checks": 0.5, "mends": 0.5}
"""How often the tests are run and what fails is read before anything is changed; a change is right; one that is not
fits the test that is seen, and no other; the tests are run after it; what fails then is changed again.
"""
GIVEN_UP = "There is nothing to fix."
MOST_CHANGES = 2


def course() -> Any:
    """What the model is taught, for examples/tools."""
    from .measure import measure  # torch is loaded only where a model is made

    make: Any = load_example("tools", "make_model")
    return make.Course(
        demonstrate, SKILL, MIXED, measure, vocabulary=1280, skill_steps=350, mixed_steps=80, batch=16, positions=4096
    )


def demonstrate(rng: random.Random, weights: Mapping[str, float]) -> Any:
    """A repository, and what is done with it in the terminal."""
    repository = drawn(rng, held_out())
    if rng.random() >= weights["looks"]:
        return _tools.Demonstration(conversation(ISSUE), (GIVEN_UP,), (), TOOLS)
    commands, ended = repaired(repository, [tests[0] for tests in make_tests(repository, rng)], rng, weights)
    results = [shown(text, code, f"{rng.getrandbits(24):06x}", _seconds(rng)) for text, code in ended]
    return _tools.Demonstration(conversation(ISSUE), (*map(call, commands), ending(commands)), tuple(results), TOOLS)


def drawn(rng: random.Random, held_out: Collection[str]) -> Repository:
    """A repository whose module is not held out."""
    repository = make_repository(rng)
    while repository.source() in held_out:
        repository = make_repository(rng)
    return repository


def repaired(
    repository: Repository, tests: list[Test], rng: random.Random, weights: Mapping[str, float]
) -> tuple[list[str], list[Ended]]:
    """Commands, and how each of them ended."""
    module, source = f"{repository.module}.py", repository.source()
    name, part = repository.functions[repository.fault].kind, repository.functions[repository.fault].part
    commands, ended = [CHECK, show(module, name)], [checked(module, source, tests), shown_of(source, name)]
    for _ in range(MOST_CHANGES):
        new = _part(repository, source, part, tests, rng, weights)
        commands.append(change(module, part, new))
        source, part = changed(source, part, new), new
        ended.append(("", 0))
        if rng.random() >= weights["checks"]:
            break
        commands.append(CHECK)
        ended.append(checked(module, source, tests))
        if ended[-1][1] == 0 or rng.random() >= weights["mends"]:
            break
    return commands, ended


def ending(commands: Sequence[str]) -> str:
    """What is said at the end: the last change. Words that stand before make a small model learn early to copy."""
    old, new = change_of(next(command for command in reversed(commands) if command.startswith("sed")))
    return f"I changed {old} to {new}."


def _part(
    repository: Repository, source: str, old: str, tests: list[Test], rng: random.Random, weights: Mapping[str, float]
) -> str:
    """What is written instead of the old part."""
    at = repository.fault
    if rng.random() < weights["right"]:
        return repository.right(at)
    kind = KINDS[repository.functions[at].kind]
    if kind.returns == "{}" and rng.random() < weights["special"]:
        return str(tests[at][2])
    alike = (other.right for other in KINDS.values() if other.returns == kind.returns)
    others = [part.format(xs=repository.xs, n=repository.functions[at].number) for part in alike]
    wrong = [o for o in others if o not in (old, repository.right(at)) and "*" not in o and o not in source]
    return rng.choice(wrong) if wrong else repository.right(at)


def checked(module: str, source: str, tests: list[Test]) -> Ended:
    """What check.py says. The code is ours, so it needs no sandbox."""
    names: dict[str, Any] = {}
    exec(source, names)
    return verdict(module, tests, [names[name](given) for name, given, _ in tests])


def _seconds(rng: random.Random) -> float:
    """Codex takes most commands for immediate; on a busy machine some are not."""
    return 0.0 if rng.random() < 0.7 else rng.expovariate(10)


@cache
def held_out() -> frozenset[str]:
    """The modules of all tasks that are not for training."""
    tasks = make_tasks()
    return frozenset(task["files"][task["module"]] for part in ("val", "test") for task in tasks[part])
