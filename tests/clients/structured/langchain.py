"""langchain-openai's `with_structured_output`."""

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

import agentlightning as agl

PACKAGE = "langchain-openai"


async def ask(question: str, llm: agl.LLM, answer: type[BaseModel]) -> BaseModel | None:
    model = ChatOpenAI(model=llm.model, base_url=llm.endpoint, api_key=SecretStr(llm.api_key or ""))
    found = await model.with_structured_output(answer, method="json_schema").ainvoke(question)
    return found if isinstance(found, BaseModel) else None
