"""Demonstrations of the three roles at work, for the small model of this example: well done and badly done.

No question of validation or test is among them.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from agentlightning.trainer.example import load_example

from . import prompts
from .data import make_data
from .questions import FUNCTIONS, Query, Question, make_question
from .sandbox import run_query

_tools: Any = load_example("tools", "demonstration")

SKILL = {"careful": 0.9, "honest": 0.97}
MIXED = {"careful": 0.16, "honest": 0.9}
"""How often a writer's query is right, and a checker's verdict true."""
OPPOSITES = {"DESC": "ASC", "ASC": "DESC", " > ": " < ", " < ": " > "}


def course() -> Any:
    """What the model is taught, for examples/tools."""
    from .measure import measure  # torch is loaded only where a model is made

    return load_example("tools", "make_model").Course(demonstrate, SKILL, MIXED, measure)


def demonstrate(rng: random.Random, weights: Mapping[str, float]) -> Any:
    """One turn of one of the roles."""
    question = make_question(rng)
    while (question.schema.name, question.text) in held_out():
        question = make_question(rng)
    schema, right = question.schema.describe(), question.query.sql()
    role = rng.choice(("write", "write", "check", "rewrite"))
    if role == "write":
        return _said(prompts.writer(schema, question.text), _block(_query(question, rng, weights["careful"])[1]))
    reason, query = _query(question, rng, 0.5 if role == "check" else 0.1)
    result = show(question.schema.name, query)
    verdict = prompts.RIGHT if query == right else f"WRONG: {reason}."
    if rng.random() > weights["honest"]:
        verdict = prompts.RIGHT if verdict != prompts.RIGHT else f"WRONG: {rng.choice(REASONS)}."
    if role == "check":
        return _said(prompts.checker(question.text, query, result), verdict)
    if verdict == prompts.RIGHT:
        verdict = f"WRONG: {rng.choice(REASONS)}."
    asked = prompts.rewriter(schema, question.text, query, result, verdict)
    return _said(asked, _block(_query(question, rng, weights["careful"])[1]))


def _query(question: Question, rng: random.Random, careful: float) -> tuple[str, str]:
    """What is wrong with it, and the query."""
    wrong = spoiled(question, rng)
    if rng.random() < careful or not wrong:
        return rng.choice(REASONS), question.query.sql()
    return rng.choice(wrong)


def spoiled(question: Question, rng: random.Random) -> list[tuple[str, str]]:
    """The query with one thing wrong, for each thing that can be: what it is, and the query."""
    query, schema = question.query, question.schema
    table, other = schema.people, schema.things
    parent = None
    if query.table == other.name:
        table, other, parent = other, table, schema.people
    columns = [c for c in table.columns(parent) if c not in ("id", question.column)]
    found = [
        ("column", _renamed(query, question.column, rng.choice(columns))),
        ("table", replace(query, table=other.name)),
        ("filter", replace(query, where="")),
        ("rows", replace(query, tail="")),
        ("function", replace(query, select=_other_function(query.select, rng))),
        ("order", _opposite(query)),
    ]
    return [(reason, one.sql()) for reason, one in found if one != query]


REASONS = ("column", "table", "filter", "rows", "function", "order")


def _renamed(query: Query, old: str, new: str) -> Query:
    return Query(
        query.select.replace(old, new),
        query.table,
        query.join,
        query.where.replace(f"{old} ", f"{new} "),
        query.tail.replace(f" {old}", f" {new}"),
    )


def _other_function(select: str, rng: random.Random) -> str:
    used = next((f for f in FUNCTIONS.values() if select.startswith(f)), None)
    return select.replace(used, rng.choice([f for f in FUNCTIONS.values() if f != used])) if used else select


def _opposite(query: Query) -> Query:
    for word, other in OPPOSITES.items():
        if word in query.tail or word in query.where:
            return replace(query, tail=query.tail.replace(word, other), where=query.where.replace(word, other))
    return query


def _said(messages: list[tuple[str, str]], text: str) -> Any:
    return _tools.Demonstration([{"role": role, "content": content} for role, content in messages], (text,))


def _block(query: str) -> str:
    return f"```sql\n{query}\n```"


@cache
def databases() -> tuple[Path, dict[str, list[dict[str, str]]]]:
    """The folder of the databases while this process lives, and the tasks."""
    folder = Path(_kept.name)
    return folder, make_data(folder)


_kept = tempfile.TemporaryDirectory(prefix="agl-sql-")


@cache
def held_out() -> frozenset[tuple[str, str]]:
    """Database and question of all tasks that are not for training."""
    _, tasks = databases()
    return frozenset((Path(t["database"]).stem, t["question"]) for part in ("val", "test") for t in tasks[part])


@cache
def show(schema: str, query: str) -> str:
    """What an agent is shown of the result."""
    return run_query(databases()[0] / f"{schema}.sqlite", query).show()
