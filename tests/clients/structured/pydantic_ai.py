"""pydantic-ai's native output."""

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

import agentlightning as agl

PACKAGE = "pydantic-ai-slim"


async def ask(question: str, llm: agl.LLM, answer: type[BaseModel]) -> BaseModel | None:
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        model = OpenAIChatModel(llm.model, provider=OpenAIProvider(openai_client=client))
        return (await Agent(model, output_type=NativeOutput(answer)).run(question)).output
