"""smolagents' ToolCallingAgent, which is synchronous and asks for a tool in every turn."""

import asyncio

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

import agentlightning as agl
from tests.clients.tool import agent_name, calc

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
