"""The one tool of all agents, and what they are told."""

from __future__ import annotations

from contextvars import ContextVar

from examples.calc.calc_agent import CALC_TOOL, MAX_TURNS, SYSTEM_PROMPT, calculate

__all__ = ["CALC_TOOL", "MAX_TURNS", "PARAMETERS", "SYSTEM_PROMPT", "agent_name", "calc", "calculate"]

PARAMETERS = CALC_TOOL["function"]["parameters"]
agent_name: ContextVar[str] = ContextVar("agent_name", default="solver")
"""What a framework's agent is to be called in this rollout."""


def calc(a: float, op: str, b: float) -> str:
    """One operation on two numbers.

    Args:
        a: The first number.
        op: One of + - * /
        b: The second number.
    """
    operations = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else float("nan")}
    if op not in operations:
        return "Error: op must be one of + - * /"
    return f"{operations[op]:g}"
