"""The players on AgentScope: a `ReActAgent` each, that hear each other in a `MsgHub`.

`@agl.rollout`, the endpoints, the lines of the log and the rewards are all that knows about training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIMultiAgentFormatter
from agentscope.message import Msg, TextBlock
from agentscope.model import OpenAIChatModel
from agentscope.pipeline import MsgHub, fanout_pipeline

import agentlightning as agl

from .game import VILLAGE, WOLVES, Game, Rules
from .moderator import Moderator
from .prompts import HISTORY, MAX_TOKENS, MODERATOR, NO_MOVE, SYSTEM, Move, spoken
from .reward import of_end, of_survival, of_votes

# One for all players: an OpenAI client that makes its own costs about 20 ms of CPU. It has few connections, since it
# looks at each of them before every request.
http = httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=32))


def seat(name: str, llm: agl.LLM, model: str) -> ReActAgent:
    """A player. The calls are recorded under its name."""
    endpoint = llm.for_agent(name).endpoint
    agent = ReActAgent(
        name=name,
        sys_prompt=SYSTEM,
        model=OpenAIChatModel(
            model,
            api_key=llm.api_key or "none",
            stream=False,
            client_kwargs={"base_url": endpoint, "http_client": http},
            generate_kwargs={"max_tokens": MAX_TOKENS},
        ),
        formatter=OpenAIMultiAgentFormatter(conversation_history_prompt=HISTORY),
        max_iters=1,
    )
    agent.set_console_output_enabled(False)
    agent.register_instance_hook("post_reasoning", "speak", speak)
    return agent


def speak(agent: ReActAgent, kwargs: dict[str, Any], said: Msg) -> Msg | None:
    """What a move says is the player's reply: without it AgentScope would make a second call for a text."""
    moves = said.get_content_blocks("tool_use")
    if not moves:
        return None
    said.content = [*moves, TextBlock(type="text", text=spoken(Move(**moves[0]["input"])))]
    return said


def moderator(text: str) -> Msg:
    return Msg(MODERATOR, text, "user")


class Players:
    """The players of one game, as the moderator speaks with them."""

    def __init__(self, game: Game, agents: dict[str, ReActAgent]) -> None:
        self._game, self._agents = game, agents

    async def tell(self, hearers: Sequence[str], text: str) -> None:
        self._log(hearers, text)
        async with MsgHub(self._of(hearers), announcement=moderator(text)):
            pass

    async def talk(self, speakers: Sequence[str], hearers: Sequence[str], text: str) -> None:
        self._log(hearers, text)
        async with MsgHub(self._of(hearers), announcement=moderator(text)):
            for agent in self._of(speakers):
                said = await agent(structured_model=Move)
                agl.emit_message(f"{agent.name}: {said.get_text_content()}")

    async def ask(self, names: Sequence[str], text: str) -> dict[str, Move]:
        self._log(names, text)
        replies = await fanout_pipeline(self._of(names), moderator(text), structured_model=Move)
        moves = {reply.name: Move(**reply.metadata) if reply.metadata else NO_MOVE for reply in replies}
        agl.emit_message(", ".join(f"{name}: {move.name}" for name, move in moves.items()))
        return moves

    def voted(self, votes: dict[str, str]) -> None:
        earn(of_votes(self._game, votes))

    def survived(self, names: Sequence[str]) -> None:
        earn(of_survival(names))

    def _of(self, names: Sequence[str]) -> list[ReActAgent]:
        return [self._agents[name] for name in names]

    def _log(self, hearers: Sequence[str], text: str) -> None:
        to = "" if len(hearers) == len(self._game.alive) else f" to {' '.join(hearers)}"
        agl.emit_message(f"{MODERATOR}{to}: {text}")


def earn(rewards: Mapping[str, Mapping[str, float]]) -> None:
    """Each player's reward, for the last of its calls."""
    for name, reward in rewards.items():
        agl.emit_reward(reward, agent=name)


@agl.rollout
async def werewolf_agent(task: dict[str, Any], llm: agl.LLM, rollout: agl.AttemptedRollout) -> None:
    """Play the game that `task["seed"]` deals.

    Each camp asks for the model of its name, `wolves` and `village`: policies that are trained, the frozen model, or
    another provider's. In a league the policy plays one camp, and whom it is given as an opponent the other one.
    """
    game, models = Game.deal(task["seed"]), {WOLVES: WOLVES, VILLAGE: VILLAGE}
    if opponent := rollout.metadata.get("opponent"):
        own = (WOLVES, VILLAGE)[rollout.metadata.get("seat", 0)]
        models = {camp: llm.model if camp == own else opponent for camp in models}
    agents = {name: seat(name, llm, models[game.camp(name)]) for name in game.alive}
    winner = await Moderator(game, Players(game, agents), Rules(**task.get("rules", {}))).play()
    agl.emit_message(f"{winner or 'Nobody'} won.")
    earn(of_end(game, winner))
