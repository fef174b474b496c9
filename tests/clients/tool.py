"""The one tool of all agents, and what they are told."""

import json
from contextvars import ContextVar
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from examples.calc.calc_agent import CALC_TOOL, MAX_TURNS, SYSTEM_PROMPT, calculate

__all__ = [
    "BOOK_TOOL",
    "CALC_TOOL",
    "MAX_TURNS",
    "PARAMETERS",
    "SYSTEM_PROMPT",
    "Booking",
    "agent_name",
    "book",
    "calc",
    "calculate",
]

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


class Booking(BaseModel):
    """What a call of `book` says. Nothing that the tiny model was trained on looks like it."""

    room: Literal["red", "blue"]
    seats: int = Field(ge=1, le=9)


BOOK_TOOL: Any = {
    "type": "function",
    "function": {"name": "book", "description": "Books a room.", "parameters": Booking.model_json_schema()},
}


def book(room: Literal["red", "blue"], seats: Annotated[int, Field(ge=1, le=9)]) -> str:
    """Books a room.

    Args:
        room: The room.
        seats: For how many people.
    """
    return json.dumps({"room": room, "seats": seats})
