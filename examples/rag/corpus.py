"""A small world that nobody can know: documents about it, and questions that need two or three.

    python -m examples.rag.corpus data/rag

writes corpus.jsonl, lines of {"title", "text"}, and train.jsonl, val.jsonl and test.jsonl, lines of {"corpus",
"question", "answer"}. A corpus and questions of your own are lines like these.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SIZES = {"train": 240, "val": 40, "test": 100}
FIRST = ("Ana", "Ben", "Cleo", "Dag", "Eva", "Finn", "Gita", "Hugo", "Ida", "Jan", "Kim", "Leo", "Mia", "Nils", "Olga")
LAST = ("Berg", "Crane", "Dahl", "Elms", "Frost", "Grove", "Hart", "Iver", "Jonas", "Kiel", "Lund", "Moor")
FIRMS = ("Arvo", "Belta", "Corda", "Delvo", "Emra", "Fenko", "Galto", "Havia", "Ilvo", "Jarda", "Kelmo", "Lunet")
KINDS = ("Works", "Mills", "Labs", "Yards", "Foods", "Tools", "Glass", "Books", "Boats", "Bikes")
TOWNS = ("Oslo", "Turin", "Lyon", "Graz", "Porto", "Ghent", "Bergen", "Malmo", "Split", "Cadiz", "Tartu", "Basel")
RIVERS = ("Alna", "Dora", "Rhone", "Mura", "Douro", "Leie", "Vossa", "Risa", "Jadra", "Guada", "Emaj", "Birsa")
GOODS = ("lamps", "chairs", "clocks", "kites", "tents", "drums", "boots", "maps", "soap", "cheese")


@dataclass(frozen=True)
class World:
    """Who founded which firm, what it makes, where they were born, and which river is there."""

    founders: dict[str, str]
    goods: dict[str, str]
    births: dict[str, str]
    rivers: dict[str, str]


def make_world(seed: int = 0) -> World:
    """Every firm has a founder of its own."""
    rng = random.Random(f"rag world {seed}")
    firms = [f"{name} {kind}" for name in FIRMS for kind in KINDS]
    people = [f"{first} {last}" for first in FIRST for last in LAST]
    rng.shuffle(firms)
    rng.shuffle(people)
    return World(
        dict(zip(firms, people, strict=False)),
        {firm: rng.choice(GOODS) for firm in firms},
        {person: rng.choice(TOWNS) for person in people},
        dict(zip(TOWNS, RIVERS, strict=True)),
    )


def make_documents(world: World) -> list[dict[str, str]]:
    """A document for each firm, each person and each town."""
    firms = [
        {"title": firm, "text": f"{firm} makes {world.goods[firm]}. It was founded by {founder}."}
        for firm, founder in world.founders.items()
    ]
    people = [{"title": person, "text": f"{person} was born in {town}."} for person, town in world.births.items()]
    towns = [{"title": town, "text": f"{town} lies on the river {river}."} for town, river in world.rivers.items()]
    return [*firms, *people, *towns]


def make_questions(world: World) -> Iterator[dict[str, str]]:
    """Questions of two hops and of three."""
    for firm, founder in world.founders.items():
        town = world.births[founder]
        yield {"question": f"Where was the founder of {firm} born?", "answer": town}
        yield {"question": f"Which river is where the founder of {firm} was born?", "answer": world.rivers[town]}
    for person, town in world.births.items():
        yield {"question": f"Which river is where {person} was born?", "answer": world.rivers[town]}


def make_tasks(seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """The tasks of each part; no question is in two of them."""
    questions = list(make_questions(make_world(seed)))
    random.Random(f"rag tasks {seed}").shuffle(questions)
    left = iter(questions)
    return {part: [next(left) for _ in range(size)] for part, size in SIZES.items()}


def write_data(folder: Path, seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """Write the corpus and the tasks as files, and give the tasks."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = str((folder / "corpus.jsonl").absolute())
    tasks = {part: [{"corpus": corpus, **task} for task in given] for part, given in make_tasks(seed).items()}
    for name, rows in {"corpus": make_documents(make_world(seed)), **tasks}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for part, tasks in write_data(given.folder, given.seed).items():
        print(f"{given.folder / part}.jsonl: {len(tasks)} tasks")


if __name__ == "__main__":
    main()
