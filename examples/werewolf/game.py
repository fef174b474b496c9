"""The rules of the game: who is what, whose votes count, who has won. Pure.

Nine players: three werewolves, three villagers, a seer, a witch and a hunter. The werewolves win when they are half of
those alive, the village when none of them is left.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

NAMES = ("Ana", "Ben", "Cem", "Dia", "Eli", "Fay", "Gus", "Hal", "Ivy")
WOLF = "werewolf"
ROLES = (WOLF,) * 3 + ("villager",) * 3 + ("seer", "witch", "hunter")
WOLVES, VILLAGE = "wolves", "village"
NOBODY = "nobody"


@dataclass(frozen=True)
class Rules:
    """What makes a game longer or shorter."""

    rounds: int = 5
    """Nights; a game that is not decided after the last day is won by nobody."""
    discussions: int = 1
    """How often each player speaks on a day, and each werewolf at night."""
    last_words: bool = True
    """Whether the victims of the first night and of the votes may speak once more."""


@dataclass
class Game:
    """A game as it stands."""

    roles: Mapping[str, str]
    rng: random.Random
    """Breaks ties."""
    alive: list[str] = field(default_factory=lambda: list(NAMES))
    potions: set[str] = field(default_factory=lambda: {"heal", "poison"})

    @staticmethod
    def deal(seed: int) -> Game:
        """The roles of a game; the same seed deals the same."""
        rng = random.Random(f"werewolf {seed}")
        return Game(dict(zip(NAMES, rng.sample(ROLES, len(ROLES)), strict=True)), rng)

    def camp(self, name: str) -> str:
        return WOLVES if self.roles[name] == WOLF else VILLAGE

    def living(self, role: str) -> list[str]:
        """Those alive who have a role."""
        return [name for name in self.alive if self.roles[name] == role]

    @property
    def winner(self) -> str | None:
        """The camp that has won; None while the game goes on."""
        wolves = len(self.living(WOLF))
        if not wolves:
            return VILLAGE
        return WOLVES if 2 * wolves >= len(self.alive) else None

    def most(self, votes: Iterable[str]) -> str | None:
        """Who has the most votes of those that name someone alive; drawn among equals. None if no vote counts."""
        counts = Counter(name for name in votes if name in self.alive)
        if not counts:
            return None
        return self.rng.choice(sorted(name for name, n in counts.items() if n == max(counts.values())))

    def remove(self, names: Sequence[str]) -> None:
        """They are dead or out."""
        self.alive = [name for name in self.alive if name not in names]
