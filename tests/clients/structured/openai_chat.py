"""The official client's `parse`, Chat Completions."""

from openai import AsyncOpenAI
from pydantic import BaseModel

import agentlightning as agl

PACKAGE = "openai"


async def ask(question: str, llm: agl.LLM, answer: type[BaseModel]) -> BaseModel | None:
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        completion = await client.chat.completions.parse(
            model=llm.model, messages=[{"role": "user", "content": question}], response_format=answer
        )
    return completion.choices[0].message.parsed
