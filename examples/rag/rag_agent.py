"""An agent on the OpenAI Agents SDK that looks things up on an MCP server.

It is an ordinary program of that SDK. `@agl.rollout`, the endpoint and the reward are all that knows about training.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunContextWrapper,
    Runner,
    UserError,
    default_tool_error_function,
    set_tracing_disabled,
)
from agents.mcp import MCPServerStdio
from openai import AsyncOpenAI

import agentlightning as agl

from .prompts import INSTRUCTIONS, MAX_TOKENS, MAX_TURNS
from .reward import earned

set_tracing_disabled(True)  # else it sends traces to its maker

# One client for all rollouts: making an OpenAI client costs about 20 ms of CPU, `with_options` less than 0.1 ms.
client = AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="set for each rollout")
# One server for each corpus and all rollouts: starting a process for each would cost more than the rollout itself.
servers: dict[str, tuple[asyncio.Future[MCPServerStdio], asyncio.Task[None]]] = {}


async def retrieval(corpus: str) -> MCPServerStdio:
    """The server of a corpus, started by whoever needs it first."""
    if corpus not in servers:
        connected = asyncio.get_running_loop().create_future()
        servers[corpus] = connected, asyncio.create_task(serve(corpus, connected))
    return await asyncio.shield(servers[corpus][0])


async def serve(corpus: str, connected: asyncio.Future[MCPServerStdio]) -> None:
    """Keep a server running. In a task of its own, because MCP closes a connection only where it was opened: when the
    program ends this is cancelled, and the rollout that came first has long been over.
    """
    arguments = [str(Path(__file__).with_name("server.py")), corpus]
    try:
        async with MCPServerStdio(
            {"command": sys.executable, "args": arguments},
            cache_tools_list=True,
            client_session_timeout_seconds=60,
            failure_error_function=failed_search,
        ) as server:
            connected.set_result(server)
            await asyncio.Event().wait()
    except Exception as error:  # all rollouts that wait for it fail with this, and the next one starts another
        del servers[corpus]
        if not connected.done():
            connected.set_exception(error)


def failed_search(context: RunContextWrapper[Any], error: Exception) -> str:
    """What the model is told of a call that it got wrong. A server that is gone is not its fault: the rollout fails."""
    if isinstance(error, (ModelBehaviorError, UserError)):
        return default_tool_error_function(context, error)
    raise error


@agl.rollout
async def rag_agent(task: dict[str, Any], llm: agl.LLM) -> None:
    """Answer `task["question"]` from the documents of `task["corpus"]`; the reward compares with `task["answer"]`."""
    chat = client.with_options(base_url=llm.endpoint, api_key=llm.api_key or "none")
    agent = Agent(
        name="researcher",
        instructions=INSTRUCTIONS,
        model=OpenAIChatCompletionsModel(llm.model, chat),
        model_settings=ModelSettings(max_tokens=MAX_TOKENS),
        mcp_servers=[await retrieval(task["corpus"])],
    )
    said, searches = "", MAX_TURNS
    try:
        result = await Runner.run(agent, task["question"], max_turns=MAX_TURNS)
    except (MaxTurnsExceeded, ModelBehaviorError):
        pass  # the model's own doing, which earns nothing
    else:
        said, searches = str(result.final_output), len(result.raw_responses) - 1
    agl.emit_reward(earned(said, task["answer"], searches), primary_key="score")
