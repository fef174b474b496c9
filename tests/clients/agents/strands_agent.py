"""Strands Agents, which always stream."""

from strands import Agent, tool
from strands.models.openai import OpenAIModel

import agentlightning as agl
from tests.clients.tool import SYSTEM_PROMPT, agent_name, calc

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
