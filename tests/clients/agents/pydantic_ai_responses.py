"""Pydantic AI over Responses, its default."""

from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

import agentlightning as agl
from tests.clients.tool import SYSTEM_PROMPT, Booking, agent_name, calc

PACKAGE, WIRE, STREAMS = "pydantic-ai-slim", "Responses", (False, True)
CHANGE = "OpenAIResponsesModel(llm.model, provider=OpenAIProvider(base_url=llm.endpoint, api_key=llm.api_key))"
NAMED = True
SCRIPTED = True


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    provider = OpenAIProvider(base_url=llm.endpoint, api_key=llm.api_key)
    agent = Agent(
        OpenAIResponsesModel(llm.model, provider=provider),
        system_prompt=SYSTEM_PROMPT,
        tools=[calc],
        name=agent_name.get(),
    )
    if not stream:
        return str((await agent.run(question)).output)
    async with agent.run_stream(question) as result:
        return str(await result.get_output())


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:

    provider = OpenAIProvider(base_url=llm.endpoint, api_key=llm.api_key)
    agent = Agent(OpenAIResponsesModel(llm.model, provider=provider), output_type=Booking, name=agent_name.get())
    return (await agent.run(question)).output.model_dump()


async def delegate(question: str, llm: agl.LLM) -> str:
    """An agent inside of a tool."""
    model = OpenAIResponsesModel(llm.model, provider=OpenAIProvider(base_url=llm.endpoint, api_key=llm.api_key))
    helper = Agent(model, system_prompt="You help.", name="helper")

    async def ask_helper(task: str) -> str:
        return str((await helper.run(task)).output)

    planner = Agent(model, system_prompt="You plan.", tools=[ask_helper], name="planner")
    return str((await planner.run(question)).output)
