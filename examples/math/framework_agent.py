"""The same agent on Microsoft's agent-framework, with its own tool for MCP servers."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from agent_framework import Agent, MCPStdioTool
from agent_framework.openai import OpenAIChatCompletionClient

import agentlightning as agl

from .reward import score

SYSTEM_PROMPT = "Answer the question. Use the calc tool for every operation."

# One server for all rollouts: starting a process for each would cost more than the rollout itself.
calculator = MCPStdioTool("calculator", command=sys.executable, args=[str(Path(__file__).with_name("server.py"))])
starting = asyncio.Lock()


async def tools() -> MCPStdioTool:
    """The tool, connected by whoever needs it first."""
    async with starting:
        if not calculator.is_connected:
            await calculator.connect()
    return calculator


@agl.rollout
async def framework_agent(task: dict[str, Any], llm: agl.LLM) -> float:
    """Answer `task["question"]`; the reward says whether the answer is `task["answer"]`."""
    agent = Agent(
        client=OpenAIChatCompletionClient(model=llm.model, base_url=llm.endpoint, api_key="dummy"),
        name="MathAgent",
        instructions=SYSTEM_PROMPT,
        tools=[await tools()],
        default_options={"max_tokens": 64},
    )
    result = await agent.run(task["question"])
    return score(result.text, task["answer"])
