"""The databases: six schemas of two tables each, the people and things in them, and SQLite files made of both.

A schema is a table of people (with a name, a text and a number) and a table of what they did (a text, a number and a
year). Nothing here knows of questions.
"""

from __future__ import annotations

import random
import sqlite3
from dataclasses import dataclass
from pathlib import Path

NAMES = ("Ana", "Ben", "Chloe", "Dan", "Eva", "Finn", "Gita", "Hugo", "Ida", "Jan", "Kim", "Leo")
YEARS = tuple(range(2019, 2025))


@dataclass(frozen=True)
class Column:
    """A column and what may be in it: texts, or whole numbers from the lowest to the highest."""

    name: str
    texts: tuple[str, ...] = ()
    lowest: int = 0
    highest: int = 0

    def draw(self, rng: random.Random) -> str | int:
        return rng.choice(self.texts) if self.texts else rng.randint(self.lowest, self.highest)


@dataclass(frozen=True)
class Table:
    """A table by its plural, with the columns that questions are about."""

    name: str
    one: str
    text: Column
    number: Column

    def columns(self, parent: Table | None) -> list[str]:
        """All columns in their order; a table of things points to its people."""
        if parent is None:
            return ["id", "name", self.text.name, self.number.name]
        return ["id", f"{parent.one}_id", self.text.name, self.number.name, "year"]


@dataclass(frozen=True)
class Schema:
    """One database: people, and what belongs to them."""

    name: str
    people: Table
    things: Table

    def describe(self) -> str:
        """What an agent is told: a line per table."""
        tables = ((self.people, None), (self.things, self.people))
        return "\n".join(f"{table.name}({', '.join(table.columns(parent))})" for table, parent in tables)


SCHEMAS = (
    Schema(
        "shop",
        Table("customers", "customer", Column("city", ("Paris", "Rome", "Oslo", "Lima")), Column("age", (), 18, 80)),
        Table("orders", "order", Column("item", ("lamp", "chair", "desk", "sofa")), Column("price", (), 5, 99)),
    ),
    Schema(
        "school",
        Table("students", "student", Column("club", ("chess", "music", "drama")), Column("height", (), 120, 190)),
        Table("exams", "exam", Column("subject", ("art", "history", "physics")), Column("points", (), 1, 60)),
    ),
    Schema(
        "library",
        Table("readers", "reader", Column("town", ("Bern", "Graz", "Turin")), Column("fines", (), 0, 40)),
        Table("loans", "loan", Column("genre", ("crime", "poetry", "travel")), Column("days", (), 1, 30)),
    ),
    Schema(
        "football",
        Table("players", "player", Column("team", ("Reds", "Blues", "Greens")), Column("speed", (), 10, 40)),
        Table("matches", "match", Column("place", ("home", "away", "abroad")), Column("goals", (), 0, 5)),
    ),
    Schema(
        "clinic",
        Table("patients", "patient", Column("ward", ("north", "south", "east")), Column("weight", (), 40, 110)),
        Table("visits", "visit", Column("reason", ("cough", "fever", "injury")), Column("minutes", (), 5, 60)),
    ),
    Schema(
        "garage",
        Table("owners", "owner", Column("street", ("Elm", "Oak", "Birch")), Column("debt", (), 0, 90)),
        Table("cars", "car", Column("brand", ("Ford", "Fiat", "Volvo")), Column("power", (), 40, 200)),
    ),
)


def make_database(schema: Schema, file: Path, seed: int = 0) -> None:
    """Write the SQLite file of a schema: twelve people and sixty things."""
    rng = random.Random(f"{schema.name} {seed}")
    people, things = schema.people, schema.things
    file.unlink(missing_ok=True)
    connection = sqlite3.connect(file)
    with connection:
        for table, parent in ((people, None), (things, people)):
            kinds = ["INTEGER PRIMARY KEY" if c == "id" else "" for c in table.columns(parent)]
            columns = ", ".join(f"{c} {k}".strip() for c, k in zip(table.columns(parent), kinds, strict=True))
            connection.execute(f"CREATE TABLE {table.name} ({columns})")
        for i, name in enumerate(NAMES, start=1):
            row = (i, name, people.text.draw(rng), people.number.draw(rng))
            connection.execute(f"INSERT INTO {people.name} VALUES (?, ?, ?, ?)", row)
        for i in range(1, 61):
            row = (i, rng.randint(1, len(NAMES)), things.text.draw(rng), things.number.draw(rng), rng.choice(YEARS))
            connection.execute(f"INSERT INTO {things.name} VALUES (?, ?, ?, ?, ?)", row)
    connection.close()
