"""How often a model solves cases, in this process and without tau2: for measuring it while making it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

from agentlightning.trainer.example import load_example

from .cases import KINDS, Case, make_case
from .desk import Desk
from .prompts import MAX_TOKENS, TOOLS, conversation
from .script import STOP, Script

TURNS = 8


class Conversation:
    """A case, what was done to its database, and what was said."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.script = Script(case.reason, "\n".join(case.known))
        self.desk = Desk(case.database)
        self.said: list[str] = []
        self.over = False

    def react(self, said: Any) -> list[dict[str, str]]:
        """The tools' answers, or the user's; nothing when the user leaves."""
        if said.tool_calls:
            answers = [self.desk.carry_out(call.name or "", call.arguments) for call in said.tool_calls]
            return [{"role": "tool", "content": answer} for answer in answers]
        self.said.append(said.content)
        reply = self.script.reply(said.content)
        self.over = reply == STOP
        return [] if self.over else [{"role": "user", "content": reply}]

    def solved(self) -> bool:
        """Whether the user left, the database is as it should be, and the user was told what they asked for."""
        right = Desk(self.case.database)
        for name, arguments in self.case.actions():
            right.carry_out(name, arguments)
        told = self.case.kind != "which_id" or any(self.case.task_id in text for text in self.said)
        transferred = self.desk.transferred or not right.transferred  # tau2 does not mind one too many
        return self.over and told and transferred and self.desk.state() == right.state()


def measure(model: Any, renderer: Any, tasks: int = 240) -> str:
    """The share of cases solved, sampled at temperature 1: of all, and of each kind."""
    rng = random.Random("measure")
    talks = [Conversation(make_case(rng, KINDS[n % len(KINDS)])) for n in range(tasks)]
    batch = load_example("tools", "batch").Batch(model, renderer)

    async def react(i: int, said: Any) -> list[dict[str, str]]:
        return talks[i].react(said)

    openings = [conversation(talk.script.opening()) for talk in talks]
    asyncio.run(batch.talk(openings, TOOLS, react, turns=TURNS, max_tokens=MAX_TOKENS["mock"]))
    solved = Counter(talk.case.kind for talk in talks if talk.solved())
    shares = [f"{kind} {solved[kind] / (tasks / len(KINDS)):.2f}" for kind in KINDS]
    return f"solved {solved.total() / tasks:.1%}: {', '.join(shares)}"
