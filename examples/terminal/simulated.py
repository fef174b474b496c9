"""A terminal that knows three commands, for demonstrations and for measuring a model while it is made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

CHECK, PASSED = "python3 check.py", "All tests pass.\n"
_SHOW = re.compile(r"grep -A2 'def (\w+)' (\w+\.py)")
_CHANGE = re.compile(r"sed -i 's/([^/]+)/([^/]*)/' (\w+\.py)")

Ended = tuple[str, int]
"""What a command wrote, and its exit code."""


def show(module: str, function: str) -> str:
    return f"grep -A2 'def {function}' {module}"


def change(module: str, old: str, new: str) -> str:
    return f"sed -i 's/{old}/{new}/' {module}"


def change_of(command: str) -> tuple[str, str]:
    """The old and the new part of a change."""
    match = _CHANGE.fullmatch(command)
    assert match is not None, command
    return match[1], match[2]


def shown_of(source: str, function: str) -> Ended:
    """The lines of a function; all are three lines long."""
    lines = source.split("\n")
    at = next((i for i, line in enumerate(lines) if f"def {function}" in line), None)
    return ("", 1) if at is None else ("".join(f"{line}\n" for line in lines[at : at + 3]), 0)


def changed(source: str, old: str, new: str) -> str:
    """As sed does it: what is first in each line. `old` is a text here, and no pattern."""
    return "\n".join(line.replace(old, new, 1) for line in source.split("\n"))


def verdict(module: str, tests: Sequence[Sequence[Any]], found: Sequence[Any]) -> Ended:
    """What check.py says of the values that the visible tests gave."""
    for (name, given, right), value in zip(tests, found, strict=True):
        if value != right:
            return f"{module.removesuffix('.py')}.{name}({given}) gives {value}, not {right}\n", 1
    return PASSED, 0


def run(command: str, module: str, source: str) -> tuple[Ended, str]:
    """What a command other than CHECK gives, and the module after it."""
    if (match := _SHOW.fullmatch(command)) and match[2] == module:
        return shown_of(source, match[1]), source
    if (match := _CHANGE.fullmatch(command)) and match[3] == module:
        return ("", 0), changed(source, match[1], match[2])
    return ("not simulated\n", 1), source
