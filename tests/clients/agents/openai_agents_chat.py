"""OpenAI's Agents SDK over Chat Completions."""

import os

os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "1")

import json
from typing import Any

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI

import agentlightning as agl
from tests.clients.tool import MAX_TURNS, SYSTEM_PROMPT, agent_name, book, calc

PACKAGE, WIRE, STREAMS = "openai-agents", "Chat Completions", (False, True)
CHANGE = 'OpenAIChatCompletionsModel(llm.model, AsyncOpenAI(base_url=llm.endpoint, api_key="dummy"))'
NAMED = True
SCRIPTED = True


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    async with AsyncOpenAI(base_url=llm.endpoint, api_key="dummy") as client:
        model = OpenAIChatCompletionsModel(llm.model, client)
        agent = Agent(name=agent_name.get(), instructions=SYSTEM_PROMPT, model=model, tools=[function_tool(calc)])
        if not stream:
            return str((await Runner.run(agent, question, max_turns=MAX_TURNS)).final_output)
        result = Runner.run_streamed(agent, question, max_turns=MAX_TURNS)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:

    async with AsyncOpenAI(base_url=llm.endpoint, api_key="dummy") as client:
        agent = Agent(
            name=agent_name.get(), model=OpenAIChatCompletionsModel(llm.model, client), tools=[function_tool(book)],
            model_settings=ModelSettings(tool_choice="required"), tool_use_behavior="stop_on_first_tool",
        )  # fmt: skip
        return json.loads((await Runner.run(agent, question)).final_output)


async def delegate(question: str, llm: agl.LLM) -> str:
    """A handoff."""
    async with AsyncOpenAI(base_url=llm.endpoint, api_key="dummy") as client:
        model = OpenAIChatCompletionsModel(llm.model, client)
        helper = Agent(name="helper", instructions="You help.", model=model)
        planner = Agent(name="planner", instructions="You plan.", model=model, handoffs=[helper])
        return str((await Runner.run(planner, question)).final_output)
