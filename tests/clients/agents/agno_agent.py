"""Agno: an agent with functions as tools, and an agent as another one's tool."""

import json
from typing import Any

from agno.agent import Agent
from agno.models.openai import OpenAILike
from agno.tools import Function

import agentlightning as agl
from tests.clients.tool import SYSTEM_PROMPT, Booking, agent_name, calc

PACKAGE, WIRE, STREAMS = "agno", "Chat Completions", (False, True)
CHANGE = 'OpenAILike(llm.model, base_url=llm.endpoint, api_key="dummy")'
NAMED = True
SCRIPTED = True


def _agent(name: str, prompt: str, llm: agl.LLM, **settings: Any) -> Agent:
    model = OpenAILike(llm.model, base_url=llm.endpoint, api_key="dummy")
    return Agent(name=name, model=model, system_message=prompt, telemetry=False, **settings)


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    agent = _agent(agent_name.get(), SYSTEM_PROMPT, llm, tools=[calc])
    if not stream:
        return str((await agent.arun(question)).content)
    pieces = [str(getattr(event, "content", "") or "") async for event in agent.arun(question, stream=True)]
    return "".join(pieces)


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:
    """The tool ends the run: the agent would be required to call it for ever."""

    booking = Function(
        name="book",
        description="Books a room.",
        parameters=Booking.model_json_schema(),
        entrypoint=lambda room, seats: json.dumps({"room": room, "seats": seats}),
        skip_entrypoint_processing=True,
        stop_after_tool_call=True,
    )
    answer = await _agent("booker", "You book.", llm, tools=[booking], tool_choice="required").arun(question)
    return json.loads(answer.tools[0].result)


async def delegate(question: str, llm: agl.LLM) -> str:
    helper = _agent("helper", "You help.", llm)

    async def ask_helper(task: str) -> str:
        """Asks the helper."""
        return str((await helper.arun(task)).content)

    return str((await _agent("planner", "You plan.", llm, tools=[ask_helper]).arun(question)).content)
