"""LlamaIndex's FunctionAgent."""

from typing import Any

from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

import agentlightning as agl
from tests.clients.tool import SYSTEM_PROMPT, agent_name, book, calc

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


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:
    model = OpenAILike(
        model=llm.model, api_base=llm.endpoint, api_key="dummy", is_chat_model=True, is_function_calling_model=True,
        context_window=1024, max_tokens=200,
    )  # fmt: skip
    said = await model.achat_with_tools([FunctionTool.from_defaults(book)], user_msg=question, tool_required=True)
    return model.get_tool_calls_from_response(said)[0].tool_kwargs


async def delegate(question: str, llm: agl.LLM) -> str:
    """A workflow whose agents hand over to each other."""
    model = OpenAILike(
        model=llm.model, api_base=llm.endpoint, api_key="dummy", is_chat_model=True, is_function_calling_model=True,
        context_window=32_768, max_tokens=200,
    )  # fmt: skip
    planner = FunctionAgent(
        name="planner", description="Plans.", llm=model, system_prompt="You plan.", can_handoff_to=["helper"]
    )
    helper = FunctionAgent(name="helper", description="Helps.", llm=model, system_prompt="You help.")
    return str(await AgentWorkflow([planner, helper], root_agent="planner").run(question))
