"""Demonstrations of the agent at work, for the small model of this example: well done and badly done.

They are about worlds of their own, in which the same names have other founders, towns and rivers. So no fact of the
tasks' world is among them, and nothing can be known by heart: what is taught is to look things up.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import cache
from typing import Any

from agentlightning.trainer.example import load_example

from .bm25 import Library
from .corpus import (
    FIRMS,
    FIRST,
    LAST,
    PARTNERS,
    RIVERS,
    TOWNS,
    Question,
    firm_name,
    make_documents,
    make_questions,
    make_world,
    person_name,
)
from .prompts import MAX_TURNS, SEARCH_TOOL, conversation

_tools: Any = load_example("tools", "demonstration")

SKILL = {"searches": 0.98, "names": 0.93, "goes_on": 0.96, "tagged": 0.98}
MIXED = {"searches": 0.85, "names": 0.8, "goes_on": 0.45, "tagged": 0.7}
"""How often the agent searches at all, for the right name, and again where it does not know yet; and how often its
answer has the form that is asked for.
"""
WORLDS = 64
ABOUT = {0: "founder", 1: "born", 2: "river"}
"""What is asked of a firm, of a person and of a town: a word that no name is found by."""


def course() -> Any:
    """What the model is taught, for examples/tools."""
    from .measure import measure  # torch is loaded only where a model is made

    return load_example("tools", "make_model").Course(demonstrate, SKILL, MIXED, measure, skill_steps=300)


def demonstrate(rng: random.Random, weights: Mapping[str, float]) -> Any:
    """A question about one of the worlds, and what is made of it."""
    questions, library = world(rng.randrange(WORLDS))
    question = rng.choice(questions)
    turns: list[str] = []
    results: list[str] = []
    known = 0  # how many of the names on the way have been found
    while known < len(question.names) - 1 and len(turns) < MAX_TURNS - 1:
        if rng.random() >= weights["goes_on" if turns else "searches"]:
            break
        right = rng.random() < weights["names"]
        query = question.names[known] if right else rng.choice(spoiled(question, known, rng))
        turns.append(call(query))
        results.append(library.search(query))
        known += right
    said = question.names[known] if known else _guess(question, rng)
    last = tagged(said) if rng.random() < weights["tagged"] else rng.choice((said, f"It is {said}."))
    return _tools.Demonstration(conversation(question.text), (*turns, last), tuple(results), [SEARCH_TOOL])


def spoiled(question: Question, known: int, rng: random.Random) -> list[str]:
    """Queries that are wrong in one way each: a part of the name, what is asked instead of whose, another's name."""
    name = question.names[known]
    if name in TOWNS:
        return [ABOUT[2], rng.choice([town for town in TOWNS if town != name])]
    firm = "&" in name
    made, ones, others = (firm_name, FIRMS, PARTNERS) if firm else (person_name, FIRST, LAST)
    first, _, last = name.split()
    another = made(rng.choice([one for one in ones if one != first]), rng.choice(others))
    return [rng.choice((first, last)), ABOUT[0 if firm else 1], another]


def _guess(question: Question, rng: random.Random) -> str:
    return rng.choice(RIVERS if question.names[-1] in RIVERS else TOWNS)


def call(query: str) -> str:
    """A tool call as the model writes it."""
    return f'<tool_call>\n{{"name": "search", "arguments": {json.dumps({"query": query})}}}\n</tool_call>'


def tagged(answer: str) -> str:
    """An answer in its form."""
    return f"<answer>{answer}</answer>"


@cache
def world(n: int) -> tuple[list[Question], Library]:
    """The questions and the documents of a world that is not the tasks'."""
    made = make_world(n + 1)
    return list(make_questions(made)), Library(make_documents(made))
