"""AG2's two agents: one that thinks, one that carries out its tool calls."""

import asyncio
import json
from typing import Any

from autogen import ConversableAgent, LLMConfig, OpenAIWrapper, register_function

import agentlightning as agl
from tests.clients.tool import BOOK_TOOL, SYSTEM_PROMPT, agent_name, calc

PACKAGE, WIRE, STREAMS = "ag2", "Chat Completions", (False, True)
CHANGE = 'LLMConfig({"model": llm.model, "base_url": llm.endpoint, "api_key": "dummy"})'
NAMED = True
SCRIPTED = True


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    config = LLMConfig({"model": llm.model, "base_url": llm.endpoint, "api_key": "dummy", "stream": stream})
    thinker = ConversableAgent(agent_name.get(), system_message=SYSTEM_PROMPT, llm_config=config)
    worker = ConversableAgent(
        "worker",
        llm_config=False,
        human_input_mode="NEVER",
        is_termination_msg=lambda message: not message.get("tool_calls"),
    )
    register_function(calc, caller=thinker, executor=worker, description="One operation on two numbers.")
    result = await worker.a_initiate_chat(thinker, message=question, max_turns=3, silent=True)
    return str(result.chat_history[-1]["content"])


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:

    config = {"model": llm.model, "base_url": llm.endpoint, "api_key": "dummy", "tools": [BOOK_TOOL]}
    client = OpenAIWrapper(config_list=[config | {"tool_choice": "required"}])
    asked = [{"role": "user", "content": question}]
    said = await asyncio.to_thread(client.create, messages=asked, cache_seed=None)
    return json.loads(said.choices[0].message.tool_calls[0].function.arguments)


async def delegate(question: str, llm: agl.LLM) -> str:
    """A chat inside of a tool."""
    config = LLMConfig({"model": llm.model, "base_url": llm.endpoint, "api_key": "dummy"})
    helper = ConversableAgent("helper", system_message="You help.", llm_config=config)
    planner = ConversableAgent("planner", system_message="You plan.", llm_config=config)
    worker = ConversableAgent(
        "worker",
        llm_config=False,
        human_input_mode="NEVER",
        is_termination_msg=lambda message: not message.get("tool_calls"),
    )

    async def ask_helper(task: str) -> str:
        said = await worker.a_initiate_chat(helper, message=task, max_turns=1, silent=True)
        return str(said.chat_history[-1]["content"])

    register_function(ask_helper, caller=planner, executor=worker, description="Asks the helper.")
    result = await worker.a_initiate_chat(planner, message=question, max_turns=3, silent=True)
    return str(result.chat_history[-1]["content"])
