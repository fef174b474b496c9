"""What the scripted user says. Pure: tau2 asks it through `user.py`, demonstrations ask it directly."""

from __future__ import annotations

import ast
import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

STOP = "###STOP###"
_PERSONS = {"You are": "I am", "you are": "I am", "You": "I", "you": "I", "Your": "My", "your": "my"}
_SECOND = re.compile(r"\b(?:you are|your|you)\b", re.IGNORECASE)
_CALL = re.compile(r"\b(\w+)(\([^()]*\))")


@dataclass(frozen=True)
class Script:
    """A user's scenario, in the second person as tau2 tells it: why they call, and what they know, a fact in a line."""

    reason: str
    known: str = ""

    def opening(self) -> str:
        """What the user says first."""
        return in_first_person(self.reason)

    def reply(self, said: str) -> str:
        """An answer, if the agent asks something: the fact that shares the most words with the question, or else all
        of them. If the agent asks nothing the user leaves.
        """
        if "?" not in said:
            return STOP
        asked, facts = _words(said), self.known.splitlines()
        best = max(facts, key=lambda fact: len(asked & _words(fact)), default="")
        return in_first_person(best if asked & _words(best) else self.known or self.reason)


def in_first_person(text: str) -> str:
    """What a user would say of themselves: `Your name is …` becomes `My name is …`."""
    return _SECOND.sub(lambda found: _PERSONS.get(found[0], found[0]), text)


def commands(said: str, tools: Container[str]) -> list[tuple[str, dict[str, Any]]]:
    """The calls of the user's own tools that the agent's words name, as in `toggle_roaming()`: the name and the
    arguments of each.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    for name, arguments in _CALL.findall(said):
        if name not in tools:
            continue
        try:
            call: Any = ast.parse(f"{name}{arguments}", mode="eval").body
            given = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        except (SyntaxError, ValueError):
            continue  # these words name no call that can be made
        if not call.args:
            found.append((name, given))
    return found


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))
