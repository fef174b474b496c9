"""Cases for tau2's mock domain, made from a seed: users and tasks in a database, what a user wants, what is right.

    python -m examples.support.cases data/support

writes train.jsonl, val.jsonl and test.jsonl, lines of {"domain": "mock", "task": …} with tasks as tau2 reads them.
tau2's own nine tasks of this domain are too few to train on; these are of their forms, and four more.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentlightning.files import atomic_write

from .desk import STATES, task, user

SIZES = {"train": 400, "val": 60, "test": 200}
FIRST = ("Ana", "Ben", "Cleo", "Dag", "Eva", "Finn", "Gita", "Hugo", "Ida", "Jan", "Kim", "Leo", "Mia", "Nils", "Olga")
LAST = ("Berg", "Crane", "Dahl", "Elms", "Frost", "Grove", "Hart", "Iver", "Jonas", "Kiel", "Lund", "Moor")
VERBS = ("Book", "Call", "Check", "Clean", "Draft", "Fix", "Order", "Paint", "Plan", "Print", "Sell", "Sort")
THINGS = ("bikes", "boxes", "cards", "chairs", "desks", "doors", "flyers", "lamps", "maps", "rooms", "shelves", "tents")
KINDS = ("create", "create_untitled", "finish", "finish_which", "reopen", "which_id", "delete", "stranger")
"""What users want: a task with a title that they say or have to be asked for; the only task, or the one that they
mean, to be completed; theirs to be pending again; to know the ID of theirs; what policy forbids, and what only users
may have, for which a human agent is to be called.
"""
NOT_ALLOWED = {"summary": "The user wants what is not allowed."}


@dataclass(frozen=True)
class Case:
    """What a user wants and knows, and the database: whose ID `user_id` and `task_id` are is what is to be found out.
    A title is that of the task that they want to have.
    """

    kind: str
    reason: str
    known: tuple[str, ...]
    caller: str
    user_id: str
    task_id: str
    title: str
    database: dict[str, Any]

    def actions(self) -> list[tuple[str, dict[str, str]]]:
        """The calls that are right, beside those that only read."""
        if self.kind in ("delete", "stranger"):
            return [("transfer_to_human_agents", NOT_ALLOWED)]
        if self.kind in ("create", "create_untitled"):
            return [("create_task", {"user_id": self.user_id, "title": self.title})]
        if self.kind == "which_id":
            return []
        return [("update_task_status", {"task_id": self.task_id, "status": STATES[self.kind != "reopen"]})]

    def as_task(self, name: str) -> dict[str, Any]:
        """A task as tau2 reads it."""
        instructions = {
            "domain": "mock",
            "reason_for_call": self.reason,
            "known_info": "\n".join(self.known),
            "task_instructions": "Tell the agent what it asks for, and nothing else. You want nothing more.",
        }
        right = self.actions()
        transfers = any(name == "transfer_to_human_agents" for name, _ in right)
        actions = [
            {"action_id": f"{name}_{n}", "name": name, "arguments": arguments}
            for n, (name, arguments) in enumerate(right)
        ]
        if transfers:
            actions[0]["compare_args"] = []  # any summary will do
        return {
            "id": name,
            "description": {"purpose": self.kind},
            "user_scenario": {"instructions": instructions},
            "initial_state": {"initialization_data": {"agent_data": self.database}},
            "evaluation_criteria": {
                "actions": actions,
                "communicate_info": [self.task_id] if self.kind == "which_id" else [],
                "reward_basis": ["DB", "COMMUNICATE", *(["ACTION"] if transfers else [])],
            },
        }


def make_case(rng: random.Random, kind: str) -> Case:
    """A case of this kind: somebody calls, who is in the database with a task or two, or is a stranger; besides them
    it has tau2's own `user_1` and `task_1`.
    """
    caller, other = (f"{first} van {rng.choice(LAST)}" for first in rng.sample(FIRST, 2))
    owned = [f"job{n}" for n in sorted(rng.sample(range(1, 10), 2 if kind == "finish_which" else 1))]
    user_id, task_id, new = f"member{rng.randrange(1, 10)}", rng.choice(owned), title(rng)
    status = STATES[1] if kind == "reopen" else STATES[0]
    database = {
        "tasks": {name: task(name, title(rng), status=status) for name in owned},
        "users": {user_id: user(user_id, other if kind == "stranger" else caller, owned)},
    }
    wish, *more = _wish(kind, task_id, new)
    known = (f"You are {caller}.", *more)
    return Case(kind, f"You are {caller} and {wish}.", known, caller, user_id, task_id, new, database)


def _wish(kind: str, task_id: str, new: str) -> tuple[str, ...]:
    """What the user wants, and a fact that they have to be asked for."""
    return {
        "create": (f"want a new task with the title {new}",),
        "create_untitled": ("want a new task", f"The title is {new}."),
        "finish": ("have finished your task",),
        "finish_which": ("have finished a task", f"The finished task is {task_id}."),
        "reopen": ("want your task to be pending again",),
        "which_id": ("want to know the ID of your task",),
        "delete": ("want to delete your task",),
        "stranger": (f"want a new task with the title {new}",),
    }[kind]


def title(rng: random.Random) -> str:
    """The title of a task."""
    return f"{rng.choice(VERBS)} {rng.choice(THINGS)}"


def make_tasks(seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """The tasks of each part, all kinds in turn; no case is in two of them."""
    rng, seen = random.Random(f"support cases {seed}"), set[str]()
    parts: dict[str, list[dict[str, Any]]] = {}
    for part, size in SIZES.items():
        rows = parts[part] = []
        while len(rows) < size:
            case = make_case(rng, KINDS[len(rows) % len(KINDS)])
            if (known := f"{case.reason} {case.database}") not in seen:
                seen.add(known)
                rows.append({"domain": "mock", "task": case.as_task(f"{part}_{len(rows)}")})
    return parts


def write_data(folder: Path, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Write the tasks as files, and give them."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks = make_tasks(seed)
    for part, rows in tasks.items():
        atomic_write(folder / f"{part}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
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
