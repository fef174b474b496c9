"""What players are told, and what they answer with. A user with another model begins by changing these.

The lines are short, because every player hears all of them again in each of its calls.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from .game import NAMES, NOBODY, WOLF, Game

SYSTEM = "You play werewolf. Say what you are or think, and name a player or nobody."
MODERATOR = "Moderator"
HISTORY = ""
"""Stands before the history that AgentScope's formatter writes."""
MAX_TOKENS = 48
Name = Literal["Ana", "Ben", "Cem", "Dia", "Eli", "Fay", "Gus", "Hal", "Ivy", "nobody"]


class Move(BaseModel):
    """What a player answers, whatever it is asked: some words, and a name."""

    say: str
    name: Name


NO_MOVE = Move(say="", name=NOBODY)
"""Of a player whose answer was none."""
MOVE_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "generate_response",
        "parameters": {
            "properties": {"say": {"type": "string"}, "name": {"enum": [*NAMES, NOBODY], "type": "string"}},
            "type": "object",
            "required": ["say", "name"],
        },
        "description": "Generate required structured output by this function and return it",
    },
}
"""The tool as the framework sends it, of `Move`; tests/clients/test_werewolf.py compares."""
MOVED = "Successfully generated response."
"""What the framework answers to that call."""


def role_line(game: Game, name: str) -> str:
    """What a player is told first."""
    others = [n for n in game.living(WOLF) if n != name]
    mates = f" with {' and '.join(others)}" if game.roles[name] == WOLF else ""
    return f"You are {name}, {game.roles[name]}{mates}."


def spoken(move: Move) -> str:
    """What the others hear of a move."""
    named = "" if move.name == NOBODY else f"{move.name}?"
    return f"{move.say} {named}".strip() or "Nothing."
