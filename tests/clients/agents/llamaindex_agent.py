"""LlamaIndex's FunctionAgent."""

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

import agentlightning as agl
from tests.clients.tool import SYSTEM_PROMPT, agent_name, calc

PACKAGE, WIRE, STREAMS = "llama-index-core", "Chat Completions", (False, True)
CHANGE = 'OpenAILike(model=llm.model, api_base=llm.endpoint, api_key="dummy", is_chat_model=True, …)'
NAMED = True
SCRIPTED = True


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    model = OpenAILike(
        model=llm.model,
        api_base=llm.endpoint,
        api_key="dummy",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=1024,
        max_tokens=64,
    )
    agent = FunctionAgent(name=agent_name.get(), tools=[calc], llm=model, system_prompt=SYSTEM_PROMPT, streaming=stream)
    return str(await agent.run(question))
