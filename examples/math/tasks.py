"""Tasks: the calculator's questions, which the model that ships can answer in part.

    python -m examples.math.tasks data/math

writes train.jsonl, val.jsonl and test.jsonl, lines of {"question", "answer"}.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from agentlightning.files import atomic_write
from agentlightning.trainer.example import load_example

SIZES = {"train": 2000, "val": 100, "test": 200}


def make_tasks() -> dict[str, list[dict[str, Any]]]:
    """The tasks of each part; no question is in two of them."""
    train, held_out = load_example("calc", "tasks").make_tasks(SIZES["train"], SIZES["val"] + SIZES["test"])
    return {"train": train, "val": held_out[: SIZES["val"]], "test": held_out[SIZES["val"] :]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, help="a file or folder of GSM8K or Calc-X, to take instead")
    given = parser.parse_args()
    folder = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    published = load_example("tools", "published").math(given.data) if given.data else None
    for part, tasks in (published or make_tasks()).items():
        atomic_write(folder / f"{part}.jsonl", "".join(json.dumps(task) + "\n" for task in tasks))
        print(f"{folder / part}.jsonl: {len(tasks)} tasks")


if __name__ == "__main__":
    main()
