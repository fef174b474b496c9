"""The official client's `parse`, Responses."""

from openai import AsyncOpenAI
from pydantic import BaseModel

import agentlightning as agl

PACKAGE = "openai"


async def ask(question: str, llm: agl.LLM, answer: type[BaseModel]) -> BaseModel | None:
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        response = await client.responses.parse(model=llm.model, input=question, text_format=answer)
    return response.output_parsed
