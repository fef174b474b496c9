"""OpenAI's Agents SDK over Responses, its default."""

import os

os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "1")

from agents import Agent, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI

import agentlightning as agl
from tests.clients.tool import MAX_TURNS, SYSTEM_PROMPT, agent_name, calc

PACKAGE, WIRE, STREAMS = "openai-agents", "Responses", (False, True)
CHANGE = "OpenAIResponsesModel(llm.model, AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key))"
NAMED = True
SCRIPTED = True


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        model = OpenAIResponsesModel(llm.model, client)
        agent = Agent(name=agent_name.get(), instructions=SYSTEM_PROMPT, model=model, tools=[function_tool(calc)])
        if not stream:
            return str((await Runner.run(agent, question, max_turns=MAX_TURNS)).final_output)
        result = Runner.run_streamed(agent, question, max_turns=MAX_TURNS)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)
