"""What moves and games are worth to each player. Pure.

A player's move is worth what it earns itself and all that its player earns after it (`credit: return_to_go`): the last
thing is whether its camp has won.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .game import Game

VOTE, INVALID, ALIVE, WON = 0.5, -0.5, 0.2, 1.0


def of_votes(game: Game, votes: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """A vote for somebody of the other camp is good, one for one's own camp bad, one for nobody alive worse."""
    return {voter: _of_vote(game, voter, name) for voter, name in votes.items()}


def _of_vote(game: Game, voter: str, name: str) -> dict[str, float]:
    if name not in game.alive:
        return {"valid": INVALID}
    return {"vote": VOTE if game.camp(name) != game.camp(voter) else -VOTE}


def of_survival(names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Living to see the end of a day."""
    return {name: {"alive": ALIVE} for name in names}


def of_end(game: Game, winner: str | None) -> dict[str, dict[str, float]]:
    """The camp that has won, dead or alive. In a game without a winner nobody has."""
    return {name: {"won": WON if game.camp(name) == winner else 0.0} for name in game.roles}
