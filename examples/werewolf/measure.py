"""How a model plays single moves, in this process, without the framework: for measuring it while making it."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from agentlightning.trainer.example import load_example

from .demonstrations import MIXED, SEER, WEREWOLF, Seat, history, play
from .game import WOLF, Game
from .prompts import MAX_TOKENS, MOVE_TOOL, MOVED, SYSTEM, Move

SEEDS = 3_000_000


def measure(model: Any, renderer: Any, games: int = 60) -> str:
    """Shares of the moves, sampled at temperature 1, that are moves at all, and of those: that name somebody alive, and
    that say the player's role; of votes, that are for whom one votes who believes what others say; of werewolves, that
    name one of their own, and that give themselves away or say that they are the seer.
    """
    rng, asked = random.Random(0), []
    for seed in range(SEEDS, SEEDS + games):
        roles, seats = Game.deal(seed).roles, play(seed, rng, MIXED)[1]
        asked += [(roles, seat, rng.randrange(len(seat.moves))) for seat in seats.values() if seat.moves]
    moves: dict[int, Move] = {}

    async def take(i: int, arguments: Any) -> str:
        with suppress(ValidationError):  # an answer that is no move
            moves[i] = Move.model_validate(arguments)
        return MOVED

    batch = load_example("tools", "batch").Batch(model, renderer)
    told = [conversation(seat, n) for _, seat, n in asked]
    asyncio.run(batch.converse(told, [MOVE_TOOL], take, turns=1, max_tokens=MAX_TOKENS))
    found: dict[str, list[bool]] = {"moves": [i in moves for i in range(len(asked))]}
    for i, move in moves.items():
        roles, seat, n = asked[i]
        question = seat.moves[n][0][-1]
        if "Alive: " in question:
            found.setdefault("alive", []).append(move.name in question.rpartition("Alive: ")[2])
        if "Alive: " in question:
            role = f"{roles[seat.name].capitalize()}."
            found.setdefault("role", []).append(move.say.startswith(role))
            if "Vote." in question and seat.moves[n][1].say not in ("", role):
                whom = "a werewolf" if seat.moves[n][1].say.endswith(WEREWOLF) else "the seer"
                found.setdefault(f"follows {whom}", []).append(move.name == seat.moves[n][1].name)
        if roles[seat.name] == WOLF:
            found.setdefault("own by night" if "kill" in question.lower() else "own", []).append(
                roles.get(move.name) == WOLF
            )
            if "Alive" not in question and "Kill" not in question:
                found.setdefault("given away", []).append(move.say == WEREWOLF)
                found.setdefault("as the seer", []).append(move.say == SEER)
    return ", ".join(f"{name} {sum(of) / len(of):.2f} of {len(of)}" for name, of in found.items())


def conversation(seat: Seat, n: int) -> list[dict[str, Any]]:
    """What a player's model is told before a move."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for lines, move in seat.moves[:n]:
        called = {"name": "generate_response", "arguments": json.dumps(move.model_dump())}
        messages.append({"role": "user", "content": history(lines)})
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": called}]})
        messages.append({"role": "tool", "content": MOVED})
    return [*messages, {"role": "user", "content": history(seat.moves[n][0])}]
