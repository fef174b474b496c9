"""LangChain's agent on LangGraph, with langchain-openai."""

from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

import agentlightning as agl
from tests.clients.tool import SYSTEM_PROMPT, Booking, agent_name, calc

PACKAGE, WIRE, STREAMS = "langchain-openai", "Chat Completions", (False, True)
CHANGE = 'ChatOpenAI(model=llm.model, base_url=llm.endpoint, api_key="dummy")'
NAMED = True
SCRIPTED = False


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    model = ChatOpenAI(model=llm.model, base_url=llm.endpoint, api_key=SecretStr("dummy"))
    graph = create_agent(model, [tool(calc)], system_prompt=SYSTEM_PROMPT, name=agent_name.get())
    given = {"messages": [HumanMessage(question)]}
    if not stream:
        return str((await graph.ainvoke(given))["messages"][-1].content)
    last = ""
    async for mode, part in graph.astream(given, stream_mode=["messages", "values"]):
        if mode == "values":
            last = str(part["messages"][-1].content)
    return last


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:

    model = ChatOpenAI(model=llm.model, base_url=llm.endpoint, api_key=SecretStr("dummy"))
    said = await model.bind_tools([Booking], tool_choice="any").ainvoke(question)
    return said.tool_calls[0]["args"]


async def delegate(question: str, llm: agl.LLM) -> str:
    """A sub-agent is a tool."""
    model = ChatOpenAI(model=llm.model, base_url=llm.endpoint, api_key=SecretStr("dummy"))
    sub_agent = create_agent(model, system_prompt="You help.", name="helper")

    @tool
    async def ask_helper(task: str) -> str:
        """Asks the helper."""
        return str((await sub_agent.ainvoke({"messages": [HumanMessage(task)]}))["messages"][-1].content)

    planner = create_agent(model, [ask_helper], system_prompt="You plan.", name="planner")
    return str((await planner.ainvoke({"messages": [HumanMessage(question)]}))["messages"][-1].content)


async def compact(question: str, llm: agl.LLM, bash: Any) -> str:
    """By its middleware."""
    model = ChatOpenAI(model=llm.model, base_url=llm.endpoint, api_key=SecretStr("dummy"))
    summing_up = SummarizationMiddleware(
        model, trigger=("tokens", 9000), keep=("messages", 2), trim_tokens_to_summarize=None
    )
    graph = create_agent(model, [tool(bash)], system_prompt="You read.", name="reader", middleware=[summing_up])
    return str((await graph.ainvoke({"messages": [HumanMessage(question)]}))["messages"][-1].content)
