"""Demonstrations of players at work, for the small model of this example: whole games, well played and badly played.

They are played by rules that know nothing but what a player has heard, before the moderator that leads the agents too.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.trainer.example import load_example

from .game import NAMES, NOBODY, ROLES, WOLF, Game, Rules
from .moderator import Moderator
from .prompts import MODERATOR, MOVE_TOOL, MOVED, SYSTEM, Move, spoken

_tools: Any = load_example("tools", "demonstration")

SKILL = {"alive": 0.98, "loyal": 0.95, "together": 0.9, "lies": 0.4, "blunders": 0.4, "follows": 0.95, "claims": 0.9}
SKILL |= {"shown": 5}
MIXED = {"alive": 0.9, "loyal": 0.5, "together": 0.4, "lies": 0.1, "blunders": 0.4, "follows": 0.9, "claims": 0.9}
"""How often a player names somebody alive; a werewolf by day nobody of its own, and whom its fellows name, and how
often one says that it is the seer, or what it is; how often the village votes for whom a seer names, and the seer says
so. And how many of a player's moves are shown, all if that is not said: in later ones there is little new to learn at
first. Werewolves say as often what they are in both, or finding who has said so would hardly be practised.
"""
SEER, VILLAGER, WEREWOLF = "Seer.", "Villager.", "Werewolf."
FIRST = 1_000_000
"""Seeds of the games that are shown begin here, far above those of the tasks."""


def course() -> Any:
    """What the model is taught, for examples/tools."""
    from .measure import measure  # torch is loaded only where a model is made

    made = load_example("tools", "make_model")
    return made.Course(
        demonstrate, SKILL, MIXED, measure, vocabulary=640, batch=16, skill_steps=800, mixed_steps=90, positions=1280
    )


def demonstrate(rng: random.Random, weights: Mapping[str, float]) -> Any:
    """The moves of one player in one game."""
    _, seats = play(FIRST + rng.randrange(FIRST), rng, weights)
    shown = int(weights["shown"]) if "shown" in weights else None
    return rng.choice([seat for seat in seats.values() if seat.moves]).demonstration(shown)


def play(seed: int, rng: random.Random, weights: Mapping[str, float]) -> tuple[str | None, dict[str, Seat]]:
    """Who has won a game, and what its players have heard and said."""
    game = Game.deal(seed)
    table = ByRule(game, rng, weights)
    return asyncio.run(Moderator(game, table, Rules(last_words=False)).play()), table.seats


@dataclass
class Seat:
    """A player's part in a game."""

    name: str
    lines: list[str] = field(default_factory=list)
    """What it has heard since its last move."""
    moves: list[tuple[list[str], Move]] = field(default_factory=list)
    """What it had heard before each of its moves, and the move."""
    named: list[tuple[str, Move]] = field(default_factory=list)
    """What others have said, and who."""
    checked: dict[str, str] = field(default_factory=dict)
    """The roles that the seer has found out."""

    def answer(self, move: Move) -> Move:
        self.moves.append((self.lines, move))
        self.lines = []
        return move

    def demonstration(self, shown: int | None = None) -> Any:
        """Its moves, or the first of them, as its model is asked for them and says them."""
        asked = [{"role": "user", "content": history(lines)} for lines, _ in self.moves[:shown]]
        turns = tuple(call(move) for _, move in self.moves[:shown])
        results = tuple([{"role": "tool", "content": MOVED}, user] for user in asked[1:])
        return _tools.Demonstration([{"role": "system", "content": SYSTEM}, asked[0]], turns, results, [MOVE_TOOL])


def history(lines: Sequence[str]) -> str:
    """What is new to a player, as AgentScope's formatter writes it."""
    return "\n".join(["<history>", *lines, "</history>"])


def call(move: Move) -> str:
    """A move as the model writes it."""
    given = {"name": "generate_response", "arguments": move.model_dump()}
    return f"<tool_call>\n{json.dumps(given)}\n</tool_call>"


class ByRule:
    """Players around a table who follow rules, each with the odds that `weights` gives."""

    def __init__(self, game: Game, rng: random.Random, weights: Mapping[str, float]) -> None:
        self._game, self._rng, self._weights = game, rng, weights
        self.seats = {name: Seat(name) for name in game.alive}

    async def tell(self, hearers: Sequence[str], text: str) -> None:
        for seat in map(self.seats.__getitem__, hearers):
            seat.lines.append(f"{MODERATOR}: {text}")
            checked, _, role = text.rstrip(".").partition(" is ")
            if role in ROLES:
                seat.checked[checked] = role

    async def talk(self, speakers: Sequence[str], hearers: Sequence[str], text: str) -> None:
        await self.tell(hearers, text)
        for name in speakers:
            move = self._move(name, text)
            for other in hearers:
                if other != name:
                    self.seats[other].lines.append(f"{name}: {spoken(move)}")
                    self.seats[other].named.append((name, move))

    async def ask(self, names: Sequence[str], text: str) -> dict[str, Move]:
        await self.tell(names, text)
        return {name: self._move(name, text) for name in names}

    def voted(self, votes: dict[str, str]) -> None: ...

    def survived(self, names: Sequence[str]) -> None: ...

    def _move(self, name: str, text: str) -> Move:
        seat, role = self.seats[name], self._game.roles[name]
        why, whom = ("", self._prey(seat, text)) if role == WOLF else self._suspect(seat, text)
        if "Who is it" in text:
            say = self._told(role == WOLF, bool(seat.checked) and seat.checked.get(whom) == WOLF)
        else:
            say = "" if "Kill whom" in text else f"{role.capitalize()}. {why}".strip()
        return seat.answer(Move.model_validate({"say": say, "name": whom}))

    def _told(self, wolf: bool, found: bool) -> str:
        """What a player says it is."""
        if wolf and self._happens("blunders"):
            return WEREWOLF
        as_seer = self._happens("lies") if wolf else found and self._happens("claims")
        return SEER if as_seer else VILLAGER

    def _prey(self, seat: Seat, text: str) -> str:
        """Whom a werewolf names: whom its fellows named, or else somebody who is none of them."""
        if "kill" not in text.lower() and not self._happens("loyal"):
            return self._anybody(seat)
        wolves = self._game.living(WOLF)
        prey = [name for name in self._game.alive if name not in wolves]
        named = [move.name for name, move in seat.named if name in wolves and move.name in prey]
        return named[-1] if named and self._happens("together") else self._one_of(seat, prey)

    def _suspect(self, seat: Seat, text: str) -> tuple[str, str]:
        """Why and whom the others name: the seer a werewolf that it has found, the others whom a seer has named, or who
        has said what it is.
        """
        alive = self._game.alive
        if text.startswith("Check"):
            return "", self._one_of(seat, [name for name in alive if name not in seat.checked])
        if "Heal" in text:
            return "", text.split()[0] if self._rng.random() < 0.5 else NOBODY
        found = [(f"{name} is {role}.", name) for name, role in seat.checked.items() if role == WOLF]
        found = [one for one in found if one[1] in alive]
        found = found or [one for one in map(_given_away, seat.named) if one[1] in alive and one[1] != seat.name]
        if found and self._happens("follows"):
            return found[-1]
        return "", NOBODY if "nobody" in text else self._anybody(seat)

    def _happens(self, what: str) -> bool:
        return self._rng.random() < self._weights[what]

    def _one_of(self, seat: Seat, names: Sequence[str]) -> str:
        left = [name for name in names if name != seat.name]
        return self._rng.choice(left) if left else self._anybody(seat)

    def _anybody(self, seat: Seat) -> str:
        names = self._game.alive if self._happens("alive") else NAMES
        return self._rng.choice([name for name in names if name != seat.name])


def _given_away(said: tuple[str, Move]) -> tuple[str, str]:
    """Who is a werewolf, if one believes what somebody says, with the words; nobody where it says nothing of it."""
    name, move = said
    if move.say == SEER:
        return spoken(move), move.name
    return (f"{name}: {WEREWOLF}", name) if move.say == WEREWOLF else ("", NOBODY)
