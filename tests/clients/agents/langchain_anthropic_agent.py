"""LangChain's agent with langchain-anthropic."""

from typing import Any

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

import agentlightning as agl
from tests.clients.tool import SYSTEM_PROMPT, Booking, agent_name, calc

PACKAGE, WIRE, STREAMS = "langchain-anthropic", "Anthropic Messages", (False, True)
CHANGE = "ChatAnthropic(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key)"
NAMED = True
SCRIPTED = False


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    model = ChatAnthropic(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key, max_tokens=100, streaming=stream)
    graph = create_agent(model, [tool(calc)], system_prompt=SYSTEM_PROMPT, name=agent_name.get())
    content = (await graph.ainvoke({"messages": [HumanMessage(question)]}))["messages"][-1].content
    return content if isinstance(content, str) else "".join(block.get("text", "") for block in content)


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:

    model = ChatAnthropic(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key, max_tokens=200)
    said = await model.bind_tools([Booking], tool_choice="any").ainvoke(question)
    return said.tool_calls[0]["args"]
