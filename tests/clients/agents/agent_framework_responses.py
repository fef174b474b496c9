"""Microsoft's Agent Framework over Responses, its default, stateful."""

from typing import Any

from agent_framework import Agent, FunctionTool
from agent_framework.openai import OpenAIChatClient

import agentlightning as agl
from tests.clients.tool import SYSTEM_PROMPT, Booking, agent_name, calc

PACKAGE, WIRE, STREAMS = "agent-framework-openai", "Responses", (False, True)
CHANGE = "OpenAIChatClient(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key)"
NAMED = True
SCRIPTED = True


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    client = OpenAIChatClient(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key)
    agent = Agent(client, SYSTEM_PROMPT, name=agent_name.get(), tools=[calc])
    if not stream:
        return (await agent.run(question)).text
    text = ""
    async for update in agent.run(question, stream=True):
        text += update.text or ""
    return text


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:
    """The framework calls the tool itself and then lets the model answer."""
    asked: list[dict[str, Any]] = []

    def book(**arguments: Any) -> str:
        asked.append(arguments)
        return "booked"

    client = OpenAIChatClient(model=llm.model, base_url=llm.endpoint, api_key="dummy")
    tool = FunctionTool(name="book", description="Books a room.", func=book, input_model=Booking)
    must = {"tool_choice": {"mode": "required", "required_function_name": "book"}}
    await Agent(client, "Book.", tools=[tool]).run(question, options=must)  # pyright: ignore[reportArgumentType]
    return asked[0]


async def delegate(question: str, llm: agl.LLM) -> str:
    """An agent as a tool."""
    client = OpenAIChatClient(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key)
    helper = Agent(client, "You help.", name="helper")
    planner = Agent(client, "You plan.", name="planner", tools=[helper.as_tool(name="helper")])
    return (await planner.run(question)).text
