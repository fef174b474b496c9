"""An agent on AutoGen that calculates with the tools of an MCP server. Only `@agl.rollout` knows about training."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from autogen_ext.tools.mcp import McpWorkbench, StdioServerParams

import agentlightning as agl

from .reward import score

SYSTEM_PROMPT = "Answer the question. Use the calc tool for every operation."
SERVER = StdioServerParams(
    command=sys.executable, args=[str(Path(__file__).with_name("server.py"))], read_timeout_seconds=60
)
MODEL_INFO = ModelInfo(
    vision=False, function_calling=True, json_output=False, family="unknown", structured_output=False
)

# One server for all rollouts: starting a process for each would cost more than the rollout itself.
workbench = McpWorkbench(SERVER)
starting = asyncio.Lock()
started = False


async def tools() -> McpWorkbench:
    """The workbench, started by whoever needs it first."""
    global started
    async with starting:
        if not started:
            await workbench.start()
            started = True
    return workbench


@agl.rollout
async def math_agent(task: dict[str, Any], llm: agl.LLM) -> float:
    """Answer `task["question"]`; the reward says whether the answer is `task["answer"]`."""
    client = OpenAIChatCompletionClient(
        model=llm.model, base_url=llm.endpoint, api_key="dummy", model_info=MODEL_INFO, max_tokens=64
    )
    agent = AssistantAgent(
        "MathAgent", client, workbench=await tools(), system_message=SYSTEM_PROMPT, max_tool_iterations=4
    )
    try:
        result = await agent.run(task=task["question"])
    finally:
        await client.close()
    return score(str(getattr(result.messages[-1], "content", "")), task["answer"])
