"""What the model is told: the problem, the tool, and what the tests say of its code."""

from __future__ import annotations

from typing import Any

SYSTEM_PROMPT = "Write a {} function f(xs). Run the tests until they pass."
TEST_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "run_tests",
        "description": "Tests the code.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
PASSED = "All tests pass."
NO_CODE = "Error: give the code"


def conversation(problem: str, language: str = "Python") -> list[dict[str, str]]:
    """What the model is told first."""
    system = SYSTEM_PROMPT.format(language)
    return [{"role": "system", "content": system}, {"role": "user", "content": f"f(xs): {problem}"}]
