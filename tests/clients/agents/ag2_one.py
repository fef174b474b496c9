"""AG2 1: an agent that is asked, and whose tools may be other agents."""

import json
from typing import Annotated, Any, Literal

from ag2 import Agent, ToolResult, tool
from ag2.config import OpenAIConfig
from pydantic import Field

import agentlightning as agl
from tests.clients.tool import SYSTEM_PROMPT, agent_name, book, calc

PACKAGE, WIRE, STREAMS = "ag2", "Chat Completions", (False, True)
CHANGE = 'OpenAIConfig(llm.model, base_url=llm.endpoint, api_key="dummy")'
NAMED = True
SCRIPTED = True


def _config(llm: agl.LLM, **settings: Any) -> OpenAIConfig:
    return OpenAIConfig(llm.model, base_url=llm.endpoint, api_key="dummy", **settings)


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    agent = Agent(agent_name.get(), SYSTEM_PROMPT, config=_config(llm, streaming=stream), tools=[calc])
    return str((await agent.ask(question)).body)


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:
    """The tool ends the run: the agent would be required to call it for ever."""

    @tool(name="book")
    def booking(room: Literal["red", "blue"], seats: Annotated[int, Field(ge=1, le=9)]) -> ToolResult:
        """Books a room."""
        return ToolResult(book(room, seats), final=True)

    agent = Agent("booker", config=_config(llm, tool_choice="required"), tools=[booking])
    return json.loads(str((await agent.ask(question)).body))


async def delegate(question: str, llm: agl.LLM) -> str:
    """An agent as another one's tool."""
    helper = Agent("helper", "You help.", config=_config(llm))

    @tool
    async def ask_helper(task: str) -> str:
        """Asks the helper."""
        return str((await helper.ask(task)).body)

    planner = Agent("planner", "You plan.", config=_config(llm), tools=[ask_helper])
    return str((await planner.ask(question)).body)
