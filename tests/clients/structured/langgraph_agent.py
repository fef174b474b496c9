"""LangChain's agent with a response format that the provider enforces."""

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

import agentlightning as agl

PACKAGE = "langchain"


async def ask(question: str, llm: agl.LLM, answer: type[BaseModel]) -> BaseModel | None:
    model = ChatOpenAI(model=llm.model, base_url=llm.endpoint, api_key=SecretStr(llm.api_key or ""))
    graph = create_agent(model, [], response_format=ProviderStrategy(answer))
    return (await graph.ainvoke({"messages": [HumanMessage(question)]}))["structured_response"]
