"""AutoGen's AssistantAgent."""

import json
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.teams import Swarm
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient

import agentlightning as agl
from tests.clients.tool import BOOK_TOOL, SYSTEM_PROMPT, agent_name, calc

PACKAGE, WIRE, STREAMS = "autogen-ext", "Chat Completions", (False, True)
CHANGE = 'OpenAIChatCompletionClient(model=llm.model, base_url=llm.endpoint, api_key="dummy", model_info=…)'
NAMED = True
SCRIPTED = True
INFO = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True}


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    client = OpenAIChatCompletionClient(
        model=llm.model, base_url=llm.endpoint, api_key="dummy", model_info=INFO  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    agent = AssistantAgent(
        agent_name.get(),
        client,
        tools=[calc],
        system_message=SYSTEM_PROMPT,
        max_tool_iterations=3,
        model_client_stream=stream,
    )
    try:
        result = None
        async for part in agent.run_stream(task=question):
            result = part
        assert isinstance(result, TaskResult)
        return result.messages[-1].content  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        await client.close()


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:
    client = OpenAIChatCompletionClient(
        model=llm.model, base_url=llm.endpoint, api_key="dummy", model_info=INFO  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    tool = BOOK_TOOL["function"]
    try:
        said = await client.create([UserMessage(content=question, source="user")], tools=[tool], tool_choice="required")
    finally:
        await client.close()
    return json.loads(said.content[0].arguments)


async def delegate(question: str, llm: agl.LLM) -> str:
    """A swarm: agents hand over to each other."""
    client = OpenAIChatCompletionClient(
        model=llm.model, base_url=llm.endpoint, api_key="dummy", model_info=INFO  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    planner = AssistantAgent("planner", client, handoffs=["helper"], system_message="You plan.")
    helper = AssistantAgent("helper", client, system_message="You help.")
    try:
        result = await Swarm([planner, helper], max_turns=2).run(task=question)
        return str(result.messages[-1].content)  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        await client.close()
