"""What a repaired repository earns: its module passes all tests, the hidden ones too, or it does not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentlightning.trainer.example import load_example

_sandbox: Any = load_example("code", "sandbox")

LARGEST_FILE = 64 * 1024
CALLS = """
def f(call):
    return globals()[call[0]](call[1])
"""
"""Behind the module, for the sandbox, which calls `f`."""


def left_behind(folder: Path, name: str) -> str | None:
    """The file as the agent left it; None for one that is missing, too large, no text, or a link."""
    path = folder.resolve() / name
    if path.resolve() != path or not path.is_file() or path.stat().st_size > LARGEST_FILE:
        return None
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return None


async def values_of(source: str, tests: Sequence[Sequence[Any]]) -> Any:
    """What the module's functions give, called in a sandbox that is not told what is right; see examples/code."""
    return await _sandbox.run_code(source + CALLS, [[name, given] for name, given, _ in tests])


async def score(source: str | None, tests: Sequence[Sequence[Any]]) -> float:
    """1.0 if all tests pass, else 0.0."""
    if source is None:
        return 0.0
    answer = await values_of(source, tests)
    right = [json.dumps(value) for *_, value in tests]
    return float(answer.error is None and [json.dumps(value) for value in answer.values] == right)
