"""The moderator: the course of a game, whoever the players are.

At night the werewolves talk and vote, the witch may heal or poison, and the seer checks somebody; by day everybody
speaks in turn, and all vote at once. A hunter who is killed or voted out may shoot, one who is poisoned may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .game import WOLF, Game, Rules
from .prompts import Move, role_line


class Table(Protocol):
    """The players, as the moderator speaks with them."""

    async def tell(self, hearers: Sequence[str], text: str) -> None:
        """They hear this."""
        ...

    async def talk(self, speakers: Sequence[str], hearers: Sequence[str], text: str) -> None:
        """The hearers hear this, then each speaker in turn says something to it that they hear too."""
        ...

    async def ask(self, names: Sequence[str], text: str) -> dict[str, Move]:
        """They answer at the same time, and nobody hears what the others say."""
        ...

    def voted(self, votes: dict[str, str]) -> None:
        """Whom each has voted for, at night or by day: for the record, and for rewards."""
        ...

    def survived(self, names: Sequence[str]) -> None:
        """They live to see the end of the day."""
        ...


class Moderator:
    """Leads one game."""

    def __init__(self, game: Game, table: Table, rules: Rules) -> None:
        self._game, self._table, self._rules = game, table, rules

    async def play(self) -> str | None:
        """The camp that has won; None if the game was not decided in time."""
        game = self._game
        for name in game.alive:
            await self._table.tell([name], role_line(game, name))
        for n in range(1, self._rules.rounds + 1):
            dead = await self._night(n)
            if not game.winner:
                await self._day(n, dead)
            if game.winner:
                break
        return game.winner

    async def _night(self, n: int) -> list[str]:
        """Who has died."""
        game, table = self._game, self._table
        wolves = game.living(WOLF)
        for _ in range(self._rules.discussions if len(wolves) > 1 else 0):
            await table.talk(wolves, wolves, f"Night {n}. Kill whom?")
        prey = [name for name in game.alive if name not in wolves]
        killed = await self._vote(wolves, "Vote to kill.", prey)
        poisoned = None
        for witch in game.living("witch"):
            if await self._heals(witch, killed):
                killed = None
            else:
                poisoned = await self._poisoned(witch)
        for seer in game.living("seer"):
            checked = await self._name(seer, self._among("Check whom?"))
            if checked in game.roles:
                await table.tell([seer], f"{checked} is {game.roles[checked]}.")
        dead = [name for name in dict.fromkeys((killed, poisoned)) if name]
        if killed and killed != poisoned:
            dead += await self._shot(killed, dead)
        game.remove(dead)
        return dead

    async def _heals(self, witch: str, killed: str | None) -> bool:
        """Whether she saves whom the werewolves have chosen: once, and not herself."""
        potions = self._game.potions
        if killed in (None, witch) or "heal" not in potions:
            return False
        if await self._name(witch, f"{killed} is attacked. Heal {killed} or nobody?") != killed:
            return False
        potions.remove("heal")
        return True

    async def _poisoned(self, witch: str) -> str | None:
        """Whom she poisons: once, and not in a night in which she has healed."""
        potions = self._game.potions
        if "poison" not in potions:
            return None
        name = await self._name(witch, self._among("Poison whom or nobody?"))
        if name not in self._game.alive:
            return None
        potions.remove("poison")
        return name

    async def _day(self, n: int, dead: list[str]) -> None:
        game, table, rules = self._game, self._table, self._rules
        news = f"Day {n}. {_and(dead)} died."
        if n == 1 and dead and rules.last_words:
            await table.talk(dead, [*game.alive, *dead], f"{news} Last words?")
            news = ""
        for _ in range(rules.discussions):
            await table.talk(game.alive, game.alive, f"{news} Who is it?".strip())
            news = ""
        out = await self._vote(game.alive, f"{news} Vote.".strip(), game.alive)
        if out is None:
            await table.tell(game.alive, f"{_and([])} left.")
        else:
            there, gone = list(game.alive), [out, *await self._shot(out, [out])]
            game.remove(gone)
            text = f"{_and(gone)} left."
            if rules.last_words and not game.winner:
                await table.talk([out], there, f"{text} Last words?")
            else:
                await table.tell(there, text)
        table.survived(game.alive)

    async def _shot(self, hunter: str, dead: Sequence[str]) -> list[str]:
        """Whom the hunter takes along, if it is one who dies."""
        game = self._game
        if game.roles[hunter] != "hunter":
            return []
        shot = await self._name(hunter, self._among("You die. Shoot whom or nobody?"))
        return [shot] if shot in game.alive and shot not in dead else []

    async def _vote(self, voters: Sequence[str], text: str, candidates: Sequence[str]) -> str | None:
        moves = await self._table.ask(voters, f"{text} Alive: {' '.join(candidates)}.")
        votes = {voter: move.name for voter, move in moves.items()}
        self._table.voted(votes)
        return self._game.most(votes.values())

    async def _name(self, player: str, text: str) -> str:
        return (await self._table.ask([player], text))[player].name

    def _among(self, text: str) -> str:
        return f"{text} Alive: {' '.join(self._game.alive)}."


def _and(names: Sequence[str]) -> str:
    return " and ".join(names) or "Nobody"
