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

from agentlightning.files import atomic_write
from agentlightning.trainer.example import load_example

SIZES = {"train": 208, "val": 60, "test": 200}
FIRST = ("Ana", "Ben", "Cleo", "Dag", "Eva", "Finn", "Gita", "Hugo", "Ida", "Jan", "Kim", "Leo", "Mia", "Nils", "Olga")
LAST = ("Berg", "Crane", "Dahl", "Elms", "Frost", "Grove", "Hart", "Iver", "Jonas", "Kiel", "Lund", "Moor")
FIRMS = ("Arvo", "Belta", "Corda", "Delvo", "Emra", "Fenko", "Galto", "Havia", "Ilvo", "Jarda", "Kelmo", "Lunet")
PARTNERS = ("Boyd", "Brook", "Ford", "Glass", "Mills", "Penn", "Pike", "Rowe", "Sons", "Stone", "Wood", "Yule")
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


@dataclass(frozen=True)
class Question:
    """A question, and the names on the way to its answer: each is found by searching for the one before."""

    text: str
    names: tuple[str, ...]

    def as_task(self) -> dict[str, str]:
        return {"question": self.text, "answer": self.names[-1]}


def firm_name(one: str, other: str) -> str:
    """In the middle of a name there is a word that is always the same. After 200 steps the small model had learnt to
    copy what follows it; without it, it still guessed the second word of people's names after 500.
    """
    return f"{one} & {other}"


def person_name(first: str, last: str) -> str:
    return f"{first} van {last}"


def make_world(seed: int = 0) -> World:
    """Every firm has a founder of its own, and every town a river."""
    rng = random.Random(f"rag world {seed}")
    firms = [firm_name(one, other) for one in FIRMS for other in PARTNERS]
    people = [person_name(first, last) for first in FIRST for last in LAST]
    rng.shuffle(firms)
    rng.shuffle(people)
    return World(
        dict(zip(firms, people, strict=False)),
        {firm: rng.choice(GOODS) for firm in firms},
        {person: rng.choice(TOWNS) for person in people},
        dict(zip(TOWNS, rng.sample(RIVERS, len(RIVERS)), strict=True)),
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


def make_questions(world: World) -> Iterator[Question]:
    """Questions of two hops and of three."""
    for firm, founder in world.founders.items():
        town = world.births[founder]
        river = world.rivers[town]
        yield Question(f"Where was the founder of {firm} born?", (firm, founder, town))
        yield Question(f"Which river is where the founder of {firm} was born?", (firm, founder, town, river))
    for person, town in world.births.items():
        yield Question(f"Which river is where {person} was born?", (person, town, world.rivers[town]))


def make_tasks(seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """The tasks of each part; no question is in two of them."""
    questions = [question.as_task() for question in make_questions(make_world(seed))]
    random.Random(f"rag tasks {seed}").shuffle(questions)
    left = iter(questions)
    return {part: [next(left) for _ in range(size)] for part, size in SIZES.items()}


def write_data(folder: Path, seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """Write the corpus and the tasks as files, and give the tasks."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = str((folder / "corpus.jsonl").absolute())
    tasks = {part: [{"corpus": corpus, **task} for task in given] for part, given in make_tasks(seed).items()}
    for name, rows in {"corpus": make_documents(make_world(seed)), **tasks}.items():
        atomic_write(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))  # others may read it
    return tasks


def write_given(folder: Path, data: Path, wikipedia: Path | None) -> dict[str, list[dict[str, str]]]:
    """MuSiQue's questions, over its own paragraphs or a dump, in the files of the made ones; the tasks of each part."""
    folder.mkdir(parents=True, exist_ok=True)
    published, corpus = load_example("tools", "published"), folder / "corpus.jsonl"
    parts, paragraphs = published.musique(data, corpus)
    with corpus.open("w", encoding="utf-8") as file:
        for document in published.wikipedia(wikipedia) if wikipedia else paragraphs:
            file.write(json.dumps(document, ensure_ascii=False) + "\n")
    for part, tasks in parts.items():
        atomic_write(folder / f"{part}.jsonl", "".join(json.dumps(task) + "\n" for task in tasks))
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="a file or folder of MuSiQue, to take instead")
    parser.add_argument("--wikipedia", type=Path, help="with --data: the dump to search instead of its paragraphs")
    given = parser.parse_args()
    written = (
        write_given(given.folder, given.data, given.wikipedia) if given.data else write_data(given.folder, given.seed)
    )
    for part, tasks in written.items():
        print(f"{given.folder / part}.jsonl: {len(tasks)} tasks")


if __name__ == "__main__":
    main()
