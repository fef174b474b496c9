"""Demonstrations of the assistant at work, for the small model of this example: well done and badly done."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from typing import Any

from agentlightning.trainer.example import load_example

from .cases import KINDS, NOT_ALLOWED, Case, make_case, make_tasks, title
from .desk import STATES, Desk
from .prompts import TOOLS, call, conversation
from .script import Script

_tools: Any = load_example("tools", "demonstration")

SKILL = {"looks": 0.98, "reads": 0.97, "asks": 0.97, "status": 0.98, "transfers": 0.97}
MIXED = {"looks": 0.7, "reads": 0.7, "asks": 0.4, "status": 0.7, "transfers": 0.4}
"""How often the assistant looks up who calls, takes the right ID from what it found, asks for what it was not told,
takes the status that is meant, and transfers those whom it may not help.
"""
ASK_TITLE, ASK_TASK = "What is the title?", "Which task is finished?"


def course() -> Any:
    """What the model is taught, for examples/tools."""
    from .measure import measure  # torch is loaded only where a model is made

    return load_example("tools", "make_model").Course(
        demonstrate, SKILL, MIXED, measure, skill_steps=700, mixed_steps=80, batch=16, positions=2048
    )


def demonstrate(rng: random.Random, weights: Mapping[str, float]) -> Any:
    """A case that is in no part of the tasks, and what is made of it."""
    case = make_case(rng, rng.choice(KINDS))
    while str(case.database) in held_out():
        case = make_case(rng, rng.choice(KINDS))
    return shown(case, rng, weights)


def shown(case: Case, rng: random.Random, weights: Mapping[str, float]) -> Any:
    """What is made of this case."""
    talk = Talk(case)
    talk.end(_worked(case, talk, rng, {name: rng.random() < weight for name, weight in weights.items()}))
    opening = Script(case.reason).opening()
    return _tools.Demonstration(conversation(opening), tuple(talk.turns), tuple(talk.results), TOOLS)


class Talk:
    """A conversation on its way: the assistant's turns, and what came back."""

    def __init__(self, case: Case) -> None:
        self._desk = Desk(case.database)
        self._script = Script(case.reason, "\n".join(case.known))
        self.turns: list[str] = []
        self.results: list[Any] = []

    def use(self, name: str, **arguments: str) -> None:
        """Call a tool."""
        self.turns.append(call(name, **arguments))
        self.results.append(self._desk.carry_out(name, arguments))

    def ask(self, question: str) -> None:
        """Ask the user."""
        self.turns.append(question)
        self.results.append(_tools.Said(self._script.reply(question)))

    def end(self, text: str) -> None:
        """Say something after which the user leaves."""
        self.turns.append(text)


def _worked(case: Case, talk: Talk, rng: random.Random, well: Mapping[str, bool]) -> str:
    """Work on the case, each part of it well or badly, and give what is said last."""
    forbidden, knows = case.kind == "delete", False
    if not forbidden and well["looks"]:
        talk.use("get_users")
        knows = True
    if case.kind in ("delete", "stranger") and (forbidden or knows) and well["transfers"]:
        talk.use("transfer_to_human_agents", **NOT_ALLOWED)
        return f"A human agent will help you, {case.caller}."
    if forbidden and rng.random() < 0.5:
        return f"Done, {case.caller}."
    user_id, task_id = _ids(case, right=knows and well["reads"])
    if case.kind == "which_id":
        return f"It is {task_id}, {case.caller}."
    if case.kind in ("create", "create_untitled", "stranger"):
        new = case.title
        if case.kind == "create_untitled":
            if well["asks"]:
                talk.ask(ASK_TITLE)
            else:
                new = title(rng)
        talk.use("create_task", user_id=user_id, title=new)
        return f"{new} is on your list, {case.caller}."
    if case.kind == "finish_which":
        if well["asks"]:
            talk.ask(ASK_TASK)
            task_id = case.task_id
        elif knows and well["reads"]:
            task_id = rng.choice(case.database["users"][case.user_id]["tasks"])
    right = STATES[0] if case.kind == "reopen" else STATES[1]
    status = right if well["status"] else _other(rng, STATES, right)
    talk.use("update_task_status", task_id=task_id, status=status)
    return f"{task_id} is {status} now, {case.caller}."


def _ids(case: Case, *, right: bool) -> tuple[str, str]:
    """The IDs of the user and of their task, or those that tau2's own database begins with."""
    return (case.user_id, case.task_id) if right and case.kind != "stranger" else ("user_1", "task_1")


@cache
def held_out() -> frozenset[str]:
    """The databases of all tasks that are not for training."""
    rows = [row["task"] for part, rows in make_tasks().items() if part != "train" for row in rows]
    return frozenset(str(row["initial_state"]["initialization_data"]["agent_data"]) for row in rows)


def _other(rng: random.Random, values: tuple[str, ...], value: str) -> str:
    return rng.choice([one for one in values if one != value])
