"""What a model said → its code; the code in the sandbox → what the model is told of it, and what it earns."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any
from weakref import WeakKeyDictionary

from .prompts import PASSED
from .sandbox import Answer, run_code


def code_in(arguments: str) -> str | None:
    """The code in a tool call's JSON; None if there is none."""
    try:
        code = json.loads(arguments)["code"]
    except (ValueError, TypeError, KeyError):
        return None
    return code if isinstance(code, str) else None


def code_block(text: str) -> str | None:
    """The code of the last block in a message, ```python or of another language; None if there is none."""
    blocks = re.findall(r"```[^\s`]*\n(.*?)```", text, flags=re.DOTALL)
    return blocks[-1].strip() if blocks else None


async def tried(code: str, tests: list[Any], language: str = "Python") -> str:
    """What the agent is told of its code."""
    return verdict(await answer_of(code, [given for given, _ in tests], language), tests)


def verdict(answer: Answer, tests: list[Any]) -> str:
    """That all is well, or the first thing that is not."""
    if answer.error is not None:
        return f"Error: {answer.error}"
    for (given, wanted), found in zip(tests, answer.values, strict=True):
        if not right(found, wanted):
            return f"Error: f({given}) is {json.dumps(found)[:60]}, not {json.dumps(wanted)}"
    return PASSED


def right(found: Any, wanted: Any) -> bool:
    """Whether they are the same value of the same type: True is not 1."""
    return json.dumps(found) == json.dumps(wanted)


async def score(code: str | None, task: dict[str, Any]) -> float:
    """What the code earns; hidden tests are run where those that can be seen pass."""
    language = task.get("language", "Python")
    if code is None or await tried(code, task["tests"], language) != PASSED:
        return 0.0
    return float(await tried(code, task["hidden"], language) == PASSED)


KEEP = 4096
_known: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, ...], asyncio.Task[Answer]]] = WeakKeyDictionary()


async def answer_of(code: str, inputs: list[Any], language: str = "Python") -> Answer:
    """What the code gives. The same code on the same inputs is run once, though a group often writes it at once."""
    known = _known.setdefault(asyncio.get_running_loop(), {})
    key = (language, code, json.dumps(inputs))
    if key not in known:
        if len(known) >= KEEP:
            known.clear()
        known[key] = asyncio.ensure_future(run_code(code, inputs, language))
    return await asyncio.shield(known[key])  # one who stops waiting takes nothing from the others
