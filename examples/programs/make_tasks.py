"""Writes the tasks of this example: `python -m examples.programs.make_tasks` from the root of the repository."""

from __future__ import annotations

import json
import random
from pathlib import Path

from examples.calc.tasks import Tree, make_problem

HERE = Path(__file__).parent
COUNT = 400


def main() -> None:
    rng = random.Random("programs")
    problems = {p.question: p for p in (make_problem(rng) for _ in range(4 * COUNT))}.values()
    one_step = [p for p in problems if _operations(p.tree) == 1]
    for name, chosen in {"tasks.jsonl": list(problems), "one_step.jsonl": one_step}.items():
        lines = [json.dumps(p.as_task()) + "\n" for p in chosen[:COUNT]]
        (HERE / name).write_text("".join(lines))


def _operations(tree: Tree) -> int:
    return 0 if isinstance(tree, int) else 1 + _operations(tree[0]) + _operations(tree[2])


if __name__ == "__main__":
    main()
