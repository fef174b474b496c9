"""tau2's mock domain in miniature, for demonstrations, which are made without tau2: users, tasks and four tools, with
the same answers. tests/clients/test_support.py compares them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

STATES = ("pending", "completed")


class Desk:
    """A database, as tau2's tasks give it, and the tools that read and change it."""

    def __init__(self, database: Mapping[str, Any]) -> None:
        given = copy.deepcopy(dict(database))
        self.tasks = {"task_1": task("task_1", "Test task", "A test task"), **given["tasks"]}
        self.users = {"user_1": user("user_1", "Test User", ["task_1"]), **given["users"]}
        self.transferred = False

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The database."""
        return self.tasks, self.users

    def carry_out(self, name: str, arguments: Any) -> str:
        """The answer to a call, which may be an error."""
        tools = {"get_users": self._get_users, "create_task": self._create_task}
        tools |= {"update_task_status": self._update, "transfer_to_human_agents": self._transfer}
        try:
            return tools[name](**arguments)
        except (KeyError, TypeError, ValueError) as error:
            return f"Error: {error}"

    def _get_users(self) -> str:
        return json.dumps(list(self.users.values()))

    def _create_task(self, user_id: str, title: str, description: str | None = None) -> str:
        if user_id not in self.users:
            raise ValueError(f"User {user_id} not found")
        made = task(f"task_{len(self.tasks) + 1}", title, description)
        self.tasks[made["task_id"]] = made
        self.users[user_id]["tasks"].append(made["task_id"])
        return json.dumps(made)

    def _update(self, task_id: str, status: str) -> str:
        if task_id not in self.tasks:
            raise ValueError(f"Task {task_id} not found")
        self.tasks[task_id]["status"] = status
        return json.dumps(self.tasks[task_id])

    def _transfer(self, summary: str) -> str:
        del summary
        self.transferred = True
        return "Transfer successful"


def task(name: str, title: str, description: str | None = None, status: str = STATES[0]) -> dict[str, Any]:
    """A task in the database."""
    return {"task_id": name, "title": title, "description": description, "status": status}


def user(name: str, called: str, tasks: Sequence[str]) -> dict[str, Any]:
    """A user in the database."""
    return {"user_id": name, "name": called, "tasks": list(tasks)}
