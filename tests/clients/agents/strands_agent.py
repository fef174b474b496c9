"""Strands Agents, which always stream."""

from typing import Any

from strands import Agent, tool
from strands.models.openai import OpenAIModel

import agentlightning as agl
from tests.clients.tool import SYSTEM_PROMPT, Booking, agent_name, calc

PACKAGE, WIRE, STREAMS = "strands-agents", "Chat Completions", (True,)
CHANGE = 'OpenAIModel(client_args={"base_url": llm.endpoint, "api_key": "dummy"}, model_id=llm.model)'
NAMED = True
SCRIPTED = True


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    model = OpenAIModel(client_args={"base_url": llm.endpoint, "api_key": "dummy"}, model_id=llm.model)
    agent = Agent(
        model=model, tools=[tool(calc)], system_prompt=SYSTEM_PROMPT, callback_handler=None, name=agent_name.get()
    )
    return str(await agent.invoke_async(question))


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:

    model = OpenAIModel(client_args={"base_url": llm.endpoint, "api_key": "dummy"}, model_id=llm.model)
    agent = Agent(model=model, callback_handler=None, structured_output_model=Booking)
    return (await agent.invoke_async(question)).structured_output.model_dump()


async def delegate(question: str, llm: agl.LLM) -> str:
    """An agent inside of a tool."""
    model = OpenAIModel(client_args={"base_url": llm.endpoint, "api_key": "dummy"}, model_id=llm.model)

    @tool
    async def ask_helper(task: str) -> str:
        """Asks the helper."""
        helper = Agent(model=model, system_prompt="You help.", callback_handler=None, name="helper")
        return str(await helper.invoke_async(task))

    planner = Agent(
        model=model, tools=[ask_helper], system_prompt="You plan.", callback_handler=None, name="planner"
    )  # fmt: skip
    return str(await planner.invoke_async(question))
