"""Writes tau2's own tasks as files: `python -m examples.support.domains retail data/retail`.

A line is {"domain", "task"}, a file one of the parts that tau2 divides a domain's tasks into: airline, retail and
telecom have train.jsonl and test.jsonl among them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tau2.data_model.tasks import Task
from tau2.registry import registry

from agentlightning.files import atomic_write


def load_tasks(domain: str) -> dict[str, list[dict[str, Any]]]:
    """The tasks of a domain in the parts that tau2 gives them; `base` is all that it reports results on."""
    load, parts = registry.get_tasks_loader(domain), registry.get_task_splits_loader(domain)
    made = {part: load(part) for part in parts()} if parts else {"base": load(None)}
    return {part: [row_of(domain, task) for task in tasks] for part, tasks in made.items()}


def row_of(domain: str, task: Task) -> dict[str, Any]:
    """A task as the agent takes it."""
    return {"domain": domain, "task": task.model_dump(mode="json", exclude_none=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("domain", choices=registry.get_domains())
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for part, tasks in load_tasks(given.domain).items():
        atomic_write(given.folder / f"{part}.jsonl", "".join(json.dumps(task) + "\n" for task in tasks))
        print(f"{given.folder / part}.jsonl: {len(tasks)} tasks")


if __name__ == "__main__":
    main()
