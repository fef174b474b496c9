"""What the model is told: the problem, the tool, and what the tests say of its code."""

from __future__ import annotations

from typing import Any

SYSTEM_PROMPT = "Write a Python function f(xs). Run the tests until they pass."
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


def conversation(problem: str) -> list[dict[str, str]]:
    """What the model is told first."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": f"f(xs): {problem}"}]
