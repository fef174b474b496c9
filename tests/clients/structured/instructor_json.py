"""instructor in its mode of JSON by a schema."""

import instructor
from openai import AsyncOpenAI
from pydantic import BaseModel

import agentlightning as agl

PACKAGE, WIRE = "instructor", "Chat Completions"
CHANGE = 'instructor.from_openai(AsyncOpenAI(base_url=llm.endpoint, api_key="dummy"), mode=…)'
SCRIPTED = False
REQUIRES_TOOL = False
MODE = instructor.Mode.JSON_SCHEMA


async def ask(question: str, llm: agl.LLM, answer: type[BaseModel]) -> BaseModel:
    async with AsyncOpenAI(base_url=llm.endpoint, api_key="dummy") as client:
        return await instructor.from_openai(client, mode=MODE).chat.completions.create(
            model=llm.model,
            messages=[{"role": "user", "content": question}],
            response_model=answer,
            max_retries=0,
        )
