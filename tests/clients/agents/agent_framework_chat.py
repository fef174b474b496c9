"""Microsoft's Agent Framework over Chat Completions."""

from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient

import agentlightning as agl
from tests.clients.tool import SYSTEM_PROMPT, agent_name, calc

PACKAGE, WIRE, STREAMS = "agent-framework-openai", "Chat Completions", (False, True)
CHANGE = "OpenAIChatCompletionClient(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key)"
NAMED = True
SCRIPTED = True


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    client = OpenAIChatCompletionClient(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key)
    agent = Agent(client, SYSTEM_PROMPT, name=agent_name.get(), tools=[calc])
    if not stream:
        return (await agent.run(question)).text
    text = ""
    async for update in agent.run(question, stream=True):
        text += update.text or ""
    return text
