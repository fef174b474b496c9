"""A program of an older user runs as it is: an async agent with an MCP server over stdio, `n_workers`, `val_data`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.metrics import read_metrics
from agentlightning.store import SqliteLightningStore

pytest.importorskip("mcp", reason="needs the package mcp")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

SERVER = """
from mcp.server.fastmcp import FastMCP

server = FastMCP("calculator")

@server.tool(description="One operation on two numbers.")
def calc(a: float, op: str, b: float) -> str:
    values = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else float("nan")}
    return f"mcp:{values[op]:g}" if op in values else "Error: op must be one of + - * /"

server.run()
"""
PROGRAM = """
import json, re, sys
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from openai import AsyncOpenAI
from agentlightning import GRPO, LitAgent, Trainer

class McpAgent(LitAgent):
    async def training_rollout_async(self, task, resources, rollout):
        llm = resources["llm"]
        async with stdio_client(StdioServerParameters(command=sys.executable, args=["server.py"])) as (read, write):
            async with ClientSession(read, write) as session:
                await session.initialize()
                tools = [{"type": "function", "function": {"name": t.name, "description": t.description,
                          "parameters": t.inputSchema}} for t in (await session.list_tools()).tools]
                async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
                    return await self.solve(client, session, llm.model, tools, task)

    async def solve(self, client, session, model, tools, task):
        messages = [{"role": "system", "content": "Answer the question. Use the calc tool for every operation."},
                    {"role": "user", "content": task["question"]}]
        for _ in range(3):
            answer = await client.chat.completions.create(model=model, messages=messages, tools=tools, max_tokens=64)
            message = answer.choices[0].message
            if not message.tool_calls:
                numbers = re.findall(r"-?[0-9]+", message.content or "")
                return 1.0 if numbers and float(numbers[-1]) == task["answer"] else 0.0
            messages.append(message)
            for call in message.tool_calls:
                try:
                    result = await session.call_tool(call.function.name, json.loads(call.function.arguments))
                    text = result.content[0].text
                except ValueError:
                    text = "Error: not JSON"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        return 0.0

    async def validation_rollout_async(self, task, resources, rollout):
        return await self.training_rollout_async(task, resources, rollout)

if __name__ == "__main__":
    tasks = [json.loads(line) for line in open(sys.argv[1])]
    algorithm = GRPO(model="calc", steps=2, tasks_per_step=2, group_size=3, max_context=1024, val_every=2)
    trainer = Trainer(algorithm=algorithm, n_workers=2, concurrency=2, run_dir="run")
    trainer.fit(McpAgent(), tasks[:40], val_data=tasks[40:42])
"""


async def test_an_async_mcp_agent_trains(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "program.py").write_text(PROGRAM)
    tasks = Path(__file__).parents[2] / "examples" / "programs" / "one_step.jsonl"
    command = [sys.executable, "program.py", str(tasks)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)  # noqa: ASYNC221
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [m["step"] for m in rows] == [0, 1, 2]
    assert all(rows[i].get("val_reward") is not None for i in (0, 2))
    assert sum(m.get("failed", 0) for m in rows) == 0, done.stdout
    store = SqliteLightningStore(tmp_path / "run" / "store.db")
    try:
        rollouts = list(await store.query_rollouts(limit=-1))
        spans = [s for r in rollouts for s in await store.query_spans(r.rollout_id)]
    finally:
        await store.close()
    assert len(rollouts) == 2 * 6 + 2 * 2
    given = json.dumps([s.attributes.get("gen_ai.input.messages", "") for s in spans])
    assert "mcp:" in given, "tool results came from the MCP server"
