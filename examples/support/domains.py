"""Writes tau2's own tasks as files: `python -m examples.support.domains retail data/retail`.

A line is {"domain", "task"}, a file one of the parts that tau2 divides a domain's tasks into: airline, retail and
telecom have train.jsonl and test.jsonl among them.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from loguru import logger

logger.disable("tau2")

from tau2.registry import registry

from agentlightning.files import atomic_write


def load_tasks(domain: str) -> dict[str, list[dict[str, Any]]]:
    """The tasks of a domain in the parts that tau2 gives them."""
    load, parts = registry.get_tasks_loader(domain), registry.get_task_splits_loader(domain)
    names = parts() if parts else {"base": None}
    return {
        name: [{"domain": domain, "task": task.model_dump(mode="json", exclude_none=True)} for task in load(name)]
        if parts
        else [{"domain": domain, "task": task.model_dump(mode="json", exclude_none=True)} for task in load(None)]
        for name in names
    }


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
