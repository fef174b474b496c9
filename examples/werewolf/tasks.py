"""Tasks: games, by the seed that deals the roles.

    python -m examples.werewolf.tasks data/werewolf

writes train.jsonl, val.jsonl and test.jsonl, lines of {"seed", "rules"}; what `rules` may hold is in `game.Rules`.
"""

from __future__ import annotations

import argparse
import json
from itertools import count
from pathlib import Path
from typing import Any

from agentlightning.files import atomic_write

SIZES = {"train": 48, "val": 24, "test": 120}
RULES = {"last_words": False}
"""Without them a game has fewer calls."""


def make_tasks() -> dict[str, list[dict[str, Any]]]:
    """The tasks of each part; no game is in two of them."""
    seeds = count()
    return {part: [{"seed": next(seeds), "rules": RULES} for _ in range(size)] for part, size in SIZES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for part, tasks in make_tasks().items():
        atomic_write(folder / f"{part}.jsonl", "".join(json.dumps(task) + "\n" for task in tasks))
        print(f"{folder / part}.jsonl: {len(tasks)} tasks")


if __name__ == "__main__":
    main()
