"""The official client's `parse`, Messages."""

from anthropic import AsyncAnthropic
from pydantic import BaseModel

import agentlightning as agl

PACKAGE = "anthropic"


async def ask(question: str, llm: agl.LLM, answer: type[BaseModel]) -> BaseModel | None:
    base_url = llm.endpoint.removesuffix("/v1")
    async with AsyncAnthropic(base_url=base_url, api_key=llm.api_key) as client:
        message = await client.messages.parse(
            model=llm.model, max_tokens=128, messages=[{"role": "user", "content": question}], output_format=answer
        )
    return message.parsed_output
