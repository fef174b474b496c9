"""Agents that play the game: against a rival that plays by a rule, and against another policy."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

import agentlightning as agl

from .game import CARDS, PRIZES, RIVALS, RULES, SYSTEM, as_bid, best, question, told

client = AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="set for each rollout")


class Player:
    """One side of a game: a conversation with a model, and the cards that are left."""

    def __init__(self, llm: agl.LLM, model: str, rival: str) -> None:
        self._chat = client.with_options(base_url=llm.endpoint, api_key=llm.api_key).chat.completions
        self._model = model
        self._messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        self._news = f"Rival: {rival}."
        self.cards = list(CARDS)

    async def bid(self, prize: int) -> int:
        """The card for this prize; the last one is bid unasked."""
        if len(self.cards) > 1:
            self._messages.append({"role": "user", "content": question(prize, self.cards, self._news)})
            answer = await self._chat.create(model=self._model, messages=self._messages, max_tokens=4)
            text = answer.choices[0].message.content or ""
            self._messages.append({"role": "assistant", "content": text})
            card = as_bid(text, self.cards)
        else:
            card = self.cards[0]
        self.cards.remove(card)
        return card

    def hear(self, bid: int, other: int, prize: int) -> None:
        """What came of the round, told before the next bid."""
        self._news = told(bid, other, prize)


class Rule:
    """A side that plays by a rule."""

    def __init__(self, name: str) -> None:
        self._rule = RULES[name]
        self._cards = list(CARDS)

    async def bid(self, prize: int) -> int:
        card = self._rule(prize, self._cards)
        self._cards.remove(card)
        return card

    def hear(self, bid: int, other: int, prize: int) -> None: ...


@agl.rollout
async def bidder(task: dict[str, Any], llm: agl.LLM) -> float:
    """Play against the rival that the task names: the share of what could have been won."""
    player, rival, left = Player(llm, llm.model, task["rival"]), RIVALS[task["rival"]], list(CARDS)
    most, won = best(tuple(task["prizes"]), task["rival"]), 0
    for prize in task["prizes"]:
        other = rival(prize, left)
        left.remove(other)
        mine = await player.bid(prize)
        player.hear(mine, other, prize)
        won += prize if mine > other else 0
    return won / most


@agl.rollout
async def duel(task: dict[str, Any], llm: agl.LLM, rollout: agl.AttemptedRollout) -> float:
    """Play against the opponent that the league drew for this rollout, or against the rule that the task gives:
    points ahead, as a share of all prizes."""
    one = Player(llm, llm.model, task["rival"])
    two = Player(llm, rollout.metadata["opponent"], task["rival"]) if "rule" not in task else Rule(task["rule"])
    ahead = 0
    for prize in task["prizes"]:
        mine, other = await one.bid(prize), await two.bid(prize)
        one.hear(mine, other, prize)
        two.hear(other, mine, prize)
        ahead += prize * ((mine > other) - (mine < other))
    return ahead / PRIZES
