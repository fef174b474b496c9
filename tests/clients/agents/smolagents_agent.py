"""smolagents' ToolCallingAgent, which is synchronous and asks for a tool in every turn."""

import asyncio
import json
from typing import Any, ClassVar

from smolagents import OpenAIServerModel, Tool, ToolCallingAgent, tool
from smolagents.models import ChatMessage, MessageRole

import agentlightning as agl
from tests.clients.tool import Booking, agent_name, calc

PACKAGE, WIRE, STREAMS = "smolagents", "Chat Completions", (False, True)
CHANGE = "OpenAIServerModel(llm.model, api_base=llm.endpoint, api_key=llm.api_key)"
NAMED = True
SCRIPTED = True
CONTINUES = False
"""It rewrites its history: tool calls and their results become plain text, so each turn is a branch of its own."""


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    return await asyncio.to_thread(_solve, question, llm, stream)


def _solve(question: str, llm: agl.LLM, stream: bool) -> str:
    model = OpenAIServerModel(llm.model, api_base=llm.endpoint, api_key=llm.api_key, max_tokens=64)
    agent = ToolCallingAgent(
        [tool(calc)], model, max_steps=2, stream_outputs=stream, verbosity_level=-1, instructions="",
        prompt_templates=_short(), name=agent_name.get(),
    )  # fmt: skip
    return str(agent.run(question))


def _short() -> dict:  # pyright: ignore
    """Its own system prompt is longer than the tiny model's context."""
    from smolagents.agents import EMPTY_PROMPT_TEMPLATES

    return {**EMPTY_PROMPT_TEMPLATES, "system_prompt": "Use the tool."}


class Book(Tool):
    name = "book"
    description = "Books a room."
    inputs: ClassVar[dict[str, Any]] = {
        name: {**part, "description": name} for name, part in Booking.model_json_schema()["properties"].items()
    }
    output_type = "string"

    def forward(self, room: str, seats: int) -> str:
        return "booked"


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:
    """As its agents ask: with the tools a call may be of, one of which is required."""
    model = OpenAIServerModel(llm.model, api_base=llm.endpoint, api_key="dummy")
    asked = [ChatMessage(role=MessageRole.USER, content=question)]
    said = await asyncio.to_thread(model.generate, asked, tools_to_call_from=[Book()])
    assert said.tool_calls is not None
    arguments = said.tool_calls[0].function.arguments
    return json.loads(arguments) if isinstance(arguments, str) else arguments


async def delegate(question: str, llm: agl.LLM) -> str:
    """A managed agent."""
    return await asyncio.to_thread(_delegate, question, llm)


def _delegate(question: str, llm: agl.LLM) -> str:
    model = OpenAIServerModel(llm.model, api_base=llm.endpoint, api_key=llm.api_key, max_tokens=200)
    helper = ToolCallingAgent([], model, max_steps=2, verbosity_level=-1, name="helper", description="Helps.")
    planner = ToolCallingAgent(
        [], model, managed_agents=[helper], max_steps=3, verbosity_level=-1, name="planner"
    )  # fmt: skip
    return str(planner.run(question))
