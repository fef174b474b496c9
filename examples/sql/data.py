"""Makes the databases and the questions about them.

    python -m examples.sql.data data/sql

writes six SQLite files, `train.jsonl`, `val.jsonl` and `test.jsonl`. A line is a task: the path of the database, the
question, and the query whose result is the right answer. Tasks of your own are lines like these.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path

from agentlightning.trainer.example import load_example

from .questions import make_question
from .sandbox import run_query
from .schemas import SCHEMAS, make_database

SIZES = {"train": 600, "val": 60, "test": 300}


def make_data(folder: Path, seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """The tasks of each part; no question is in two of them. Writes the databases."""
    folder.mkdir(parents=True, exist_ok=True)
    for schema in SCHEMAS:
        new = folder / f"{schema.name}.{os.getpid()}.new"  # others may read the old one meanwhile
        make_database(schema, new, seed)
        new.replace(folder / f"{schema.name}.sqlite")
    rng, tasks = random.Random(f"sql tasks {seed}"), {}
    while len(tasks) < sum(SIZES.values()):
        question = make_question(rng)
        task = question.as_task() | {"database": str(folder / f"{question.schema.name}.sqlite")}
        if (task["database"], task["question"]) in tasks:
            continue
        rows = run_query(Path(task["database"]), task["query"]).rows
        if any(value is not None for row in rows for value in row):  # an empty answer is too easily right
            tasks[task["database"], task["question"]] = task
    left = iter(tasks.values())
    return {part: [next(left) for _ in range(size)] for part, size in SIZES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="Spider's folder, to take instead of making databases")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    given = load_example("tools", "published").spider(options.data) if options.data else None
    for part, tasks in (given or make_data(options.folder, options.seed)).items():
        (options.folder / f"{part}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        print(f"{options.folder / part}.jsonl: {len(tasks)} tasks")


if __name__ == "__main__":
    main()
