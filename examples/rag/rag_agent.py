"""An agent on the OpenAI Agents SDK that looks things up on an MCP server. Only `@agl.rollout` knows about training."""

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
    Runner,
    set_tracing_disabled,
)
from agents.mcp import MCPServerStdio
from openai import AsyncOpenAI

import agentlightning as agl

from .reward import score

INSTRUCTIONS = "Answer the question. Search until you know. Give the answer in <answer></answer>."
MAX_TURNS = 5
set_tracing_disabled(True)  # else it sends traces to its maker

# One server for each corpus and all rollouts: starting a process for each would cost more than the rollout itself.
servers: dict[str, MCPServerStdio] = {}
starting = asyncio.Lock()


async def retrieval(corpus: str) -> MCPServerStdio:
    """The server of a corpus, started by whoever needs it first."""
    async with starting:
        if corpus not in servers:
            arguments = [str(Path(__file__).with_name("server.py")), corpus]
            server = MCPServerStdio(
                {"command": sys.executable, "args": arguments}, cache_tools_list=True, client_session_timeout_seconds=60
            )
            await server.connect()
            servers[corpus] = server
    return servers[corpus]


@agl.rollout
async def rag_agent(task: dict[str, Any], llm: agl.LLM) -> float:
    """Answer `task["question"]` from the documents of `task["corpus"]`; the reward compares with `task["answer"]`."""
    client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none")
    agent = Agent(
        name="researcher",
        instructions=INSTRUCTIONS,
        model=OpenAIChatCompletionsModel(llm.model, client),
        model_settings=ModelSettings(max_tokens=64),
        mcp_servers=[await retrieval(task["corpus"])],
    )
    try:
        result = await Runner.run(agent, task["question"], max_turns=MAX_TURNS)
    except (MaxTurnsExceeded, ModelBehaviorError):  # the model's own doing
        return 0.0
    return score(str(result.final_output), task["answer"])
