"""CrewAI."""

import json
import os
from typing import Any

os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")
os.environ.setdefault("CREWAI_TRACING_ENABLED", "false")

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

import agentlightning as agl
from tests.clients.tool import BOOK_TOOL, SYSTEM_PROMPT, agent_name, book, calc

PACKAGE, WIRE, STREAMS = "crewai", "Chat Completions", (False, True)
CHANGE = 'LLM(f"openai/{llm.model}", base_url=llm.endpoint, api_key="dummy")'
NAMED = True
SCRIPTED = True


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    model = LLM(f"openai/{llm.model}", base_url=llm.endpoint, api_key="dummy", stream=stream)
    agent = Agent(role=agent_name.get(), goal="answer", backstory=SYSTEM_PROMPT, llm=model, tools=[tool("calc")(calc)])
    result = await agent.kickoff_async(question)
    return result.raw


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:
    """An agent's own tools go out with tool_choice "auto"; what is required is a parameter of the model."""
    required = {"type": "function", "function": {"name": "book"}}
    model = LLM(f"openai/{llm.model}", base_url=llm.endpoint, api_key="dummy", tools=[BOOK_TOOL], tool_choice=required)
    said = await model.acall(question, available_functions={"book": book})
    return json.loads(said)


async def delegate(question: str, llm: agl.LLM) -> str:
    """A crew, one of whose agents may delegate."""
    model = LLM(f"openai/{llm.model}", base_url=llm.endpoint, api_key="dummy")
    planner = Agent(role="planner", goal="plan", backstory="Plans.", llm=model, allow_delegation=True)
    helper = Agent(role="helper", goal="help", backstory="Helps.", llm=model)
    task = Task(description=question, expected_output="a text", agent=planner)
    return (await Crew(agents=[planner, helper], tasks=[task]).kickoff_async()).raw
