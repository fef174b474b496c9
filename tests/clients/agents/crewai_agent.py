"""CrewAI."""

import os

os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")
os.environ.setdefault("CREWAI_TRACING_ENABLED", "false")

from crewai import LLM, Agent
from crewai.tools import tool

import agentlightning as agl
from tests.clients.tool import SYSTEM_PROMPT, agent_name, calc

PACKAGE, WIRE, STREAMS = "crewai", "Chat Completions", (False, True)
CHANGE = 'LLM(f"openai/{llm.model}", base_url=llm.endpoint, api_key=llm.api_key)'
NAMED = True
SCRIPTED = True


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    model = LLM(f"openai/{llm.model}", base_url=llm.endpoint, api_key=llm.api_key, stream=stream)
    agent = Agent(role=agent_name.get(), goal="answer", backstory=SYSTEM_PROMPT, llm=model, tools=[tool("calc")(calc)])
    result = await agent.kickoff_async(question)
    return result.raw
