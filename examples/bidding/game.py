"""The rules: four prizes come up one after the other, and each player bids one of its cards for it. Pure.

Both hold the cards 1 to 4 and use each once. The higher bid wins the prize; equal bids win nobody anything. So a card
that wins now is missing later (Goofspiel). No way of bidding is best: "the prize's own number" loses to "one more than
the prize", that to "two more", and so on round.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import permutations
from typing import Any

CARDS: tuple[int, ...] = (1, 2, 3, 4)
PRIZES = sum(CARDS)

Rival = Callable[[int, Sequence[int]], int]
"""(the prize, the cards it still has) → its bid."""


def _at_or_above(card: int, cards: Sequence[int]) -> int:
    return min((c for c in cards if c >= card), default=min(cards))


RIVALS: dict[str, Rival] = {
    "even": lambda prize, cards: _at_or_above(prize, cards),
    "proud": lambda prize, cards: max(cards),
    "shy": lambda prize, cards: min(cards),
}
"""Rivals that play by a rule, by name."""
RULES: dict[str, Rival] = {**RIVALS, "plus one": lambda prize, cards: _at_or_above(prize % len(CARDS) + 1, cards)}
"""Also one that no training sees: it bids one more than the prize, and its lowest card for the highest."""


def points(prizes: Sequence[int], bids: Sequence[int], others: Sequence[int]) -> list[int]:
    """What the bids win in each round."""
    return [p if b > o else 0 for p, b, o in zip(prizes, bids, others, strict=False)]


def rival_bids(rival: Rival, prizes: Sequence[int]) -> list[int]:
    """A rival's bids for prizes in their order; what the other player does is nothing to it."""
    left, found = list(CARDS), []
    for prize in prizes:
        found.append(rival(prize, left))
        left.remove(found[-1])
    return found


@cache
def best_bids(prizes: tuple[int, ...], name: str) -> list[tuple[int, ...]]:
    """All ways to win the most that can be won against a rival, by trying everything."""
    others = rival_bids(RIVALS[name], prizes)
    won = {bids: sum(points(prizes, bids, others)) for bids in permutations(CARDS)}
    return [bids for bids, points_ in won.items() if points_ == max(won.values())]


def best(prizes: tuple[int, ...], name: str) -> int:
    """The most that can be won against a rival."""
    return sum(points(prizes, best_bids(prizes, name)[0], rival_bids(RIVALS[name], prizes)))


def as_bid(text: str, cards: Sequence[int]) -> int:
    """The card that a model's answer names; the lowest one where it names none that it still has."""
    found = re.findall(r"\d+", text)
    return int(found[0]) if len(found) == 1 and int(found[0]) in cards else min(cards)


def question(prize: int, cards: Sequence[int], before: str) -> str:
    """What a player is told before a bid; `before` is what came of the last round, or who the rival is."""
    return f"{before} Prize: {prize}. Cards: {' '.join(map(str, cards))}."


def told(bid: int, other: int, prize: int) -> str:
    """What came of a round."""
    return f"It bids {other}: {'won' if bid > other else 'lost' if bid < other else 'tie'}."


SYSTEM = "Bid a card for each prize."
PLAYED = ("proud", "shy")
"""The rivals of the tasks. What "even" bids hangs on the prize, which is harder to find out."""
UNKNOWN = "player"
"""How a rival is called that plays by no rule that is known."""


def make_tasks(rivals: Sequence[str] = PLAYED, seed: int = 0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """For training and for validation: every order of the prizes with every rival, a third of the orders held out."""
    orders = list(permutations(CARDS))
    random.Random(seed).shuffle(orders)
    held_out = len(orders) // 3
    tasks = [{"prizes": list(order), "rival": name} for order in orders for name in rivals]
    return tasks[held_out * len(rivals) :], tasks[: held_out * len(rivals)]


def make_duels() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Tasks of two players: every order of the prizes; for validation against each of the rules."""
    duels = [{"prizes": list(order), "rival": UNKNOWN} for order in permutations(CARDS)]
    return duels, [{**duel, "rule": name} for duel in duels for name in RULES]
