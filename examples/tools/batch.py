"""Many conversations with a model side by side, in this process, without HTTP: for measuring it while making it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch
from renderers import ToolCallParseStatus

from agentlightning.trainer.example import load_example

Messages = Sequence[dict[str, Any]]


class Batch:
    """Samples at temperature 1, from a seed."""

    def __init__(self, model: Any, renderer: Any) -> None:
        self._model, self._renderer = model, renderer
        self._play: Any = load_example("calc", "play")
        self._generator = torch.Generator().manual_seed(0)

    def ask(self, conversations: Sequence[Messages]) -> list[str]:
        """What the model says to each."""
        if not conversations:
            return []
        prompts = [self._renderer.render_ids(list(c), add_generation_prompt=True) for c in conversations]
        stop = self._renderer.get_stop_token_ids()
        said = self._play.sample(self._model, prompts, stop, generator=self._generator)
        return [self._renderer.parse_response(response).content for response in said]

    async def converse(
        self,
        conversations: Sequence[Messages],
        tools: list[dict[str, Any]],
        carry_out: Callable[[int, Any], Awaitable[str]],
        *,
        turns: int,
        max_tokens: int,
    ) -> list[str]:
        """What the model says to each when it calls no tool any more; "" if it has not come to that in so many turns.

        `carry_out` gives the result of a tool call from the number of its conversation and its arguments.
        """
        last = [""] * len(conversations)

        async def react(i: int, said: Any) -> list[dict[str, str]]:
            calls = [call for call in said.tool_calls if call.status == ToolCallParseStatus.OK]
            if not calls:
                last[i] = said.content
            answers = await asyncio.gather(*(carry_out(i, call.arguments) for call in calls))
            return [{"role": "tool", "content": answer} for answer in answers]

        await self.talk(conversations, tools, react, turns=turns, max_tokens=max_tokens)
        return last

    async def talk(
        self,
        conversations: Sequence[Messages],
        tools: list[dict[str, Any]],
        react: Callable[[int, Any], Awaitable[list[dict[str, str]]]],
        *,
        turns: int,
        max_tokens: int,
    ) -> None:
        """Go on with each until nothing follows, or for so many turns. `react` gives the messages that follow from the
        number of a conversation and what the model said, parsed.
        """
        prompts = [self._renderer.render_ids(list(c), tools=tools, add_generation_prompt=True) for c in conversations]
        active, stop = list(range(len(prompts))), self._renderer.get_stop_token_ids()
        for _ in range(turns):
            if not active:
                break
            asked = [prompts[i] for i in active]
            said = self._play.sample(self._model, asked, stop, generator=self._generator, max_tokens=max_tokens)
            going_on: list[int] = []
            for i, response in zip(active, said, strict=True):
                parsed = self._renderer.parse_response(response, tools=tools, prompt_ids=prompts[i])
                results: Any = await react(i, parsed)
                following = results and self._renderer.bridge_to_next_turn(prompts[i], response, results, tools=tools)
                if following:
                    prompts[i] = following.token_ids
                    going_on.append(i)
            active = going_on
