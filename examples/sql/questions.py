"""Questions about the databases, each with the query that answers it. Six kinds, from a count to a join.

Not a benchmark: every question comes from a template below, over the schemas of `schemas.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .schemas import NAMES, SCHEMAS, YEARS, Schema, Table

FUNCTIONS = {"highest": "MAX", "lowest": "MIN", "average": "AVG", "total": "SUM"}


@dataclass(frozen=True)
class Query:
    """A SELECT by its parts, so that one part can be got wrong."""

    select: str
    table: str
    join: str = ""
    where: str = ""
    tail: str = ""

    def sql(self) -> str:
        where = f"WHERE {self.where}" if self.where else ""
        return " ".join(
            part for part in (f"SELECT {self.select} FROM {self.table}", self.join, where, self.tail) if part
        )


@dataclass(frozen=True)
class Question:
    """A question in words, and its query."""

    schema: Schema
    text: str
    query: Query
    column: str
    """The column that the question is most about: the one to mistake for another."""

    def as_task(self) -> dict[str, str]:
        return {"database": self.schema.name, "question": self.text, "query": self.query.sql()}


def make_question(rng: random.Random) -> Question:
    """One question of a random kind about a random database."""
    return rng.choice(KINDS)(rng, rng.choice(SCHEMAS))


def _count(rng: random.Random, schema: Schema) -> Question:
    table = rng.choice((schema.people, schema.things))
    value, column = table.text.draw(rng), table.text.name
    text = f"How many {table.name} have the {column} {value}?"
    return Question(schema, text, Query("COUNT(*)", table.name, where=f"{column} = '{value}'"), column)


def _filter(rng: random.Random, schema: Schema) -> Question:
    column = schema.people.number
    word, operator = rng.choice((("above", ">"), ("below", "<")))
    value = rng.randint(column.lowest, column.highest)
    text = f"Which {schema.people.name} have {column.name} {word} {value}?"
    query = Query("name", schema.people.name, where=f"{column.name} {operator} {value}")
    return Question(schema, text, query, column.name)


def _aggregate(rng: random.Random, schema: Schema) -> Question:
    word = rng.choice(list(FUNCTIONS))
    table: Table = rng.choice((schema.people, schema.things))
    number = table.number.name
    if table is schema.things and rng.random() < 0.5:
        year = rng.choice(YEARS)
        text, where = f"What is the {word} {number} of the {table.name} in {year}?", f"year = {year}"
    else:
        value, column = table.text.draw(rng), table.text.name
        text = f"What is the {word} {number} of the {table.name} with the {column} {value}?"
        where = f"{column} = '{value}'"
    return Question(schema, text, Query(f"{FUNCTIONS[word]}({number})", table.name, where=where), number)


def _top(rng: random.Random, schema: Schema) -> Question:
    word, order = rng.choice((("highest", "DESC"), ("lowest", "ASC")))
    people, column = schema.people, schema.people.number.name
    query = Query("name", people.name, tail=f"ORDER BY {column} {order} LIMIT 1")
    return Question(schema, f"Which {people.one} has the {word} {column}?", query, column)


def _each(rng: random.Random, schema: Schema) -> Question:
    table = rng.choice((schema.people, schema.things))
    column = table.text.name
    query = Query(f"{column}, COUNT(*)", table.name, tail=f"GROUP BY {column}")
    return Question(schema, f"How many {table.name} are there for each {column}?", query, column)


def _join(rng: random.Random, schema: Schema) -> Question:
    people, things = schema.people, schema.things
    word, name, number = rng.choice(list(FUNCTIONS)), rng.choice(NAMES), schema.things.number.name
    text = f"What is the {word} {number} of the {things.name} of {name}?"
    query = Query(
        f"{FUNCTIONS[word]}({number})",
        things.name,
        join=f"JOIN {people.name} ON {people.name}.id = {people.one}_id",
        where=f"name = '{name}'",
    )
    return Question(schema, text, query, number)


KINDS: tuple[Callable[[random.Random, Schema], Question], ...] = (_count, _filter, _aggregate, _top, _each, _join)
