"""As scripts for 0.3 that answer from passages: an agent of the Agents SDK on LiteLLM, whose tool is an MCP server's
over SSE, trained by VERL's settings on tasks in Parquet.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pandas as pd  # pyright: ignore[reportMissingImports]
from agents import Agent, ModelSettings, Runner, set_tracing_disabled
from agents.extensions.models.litellm_model import LitellmModel
from agents.mcp import MCPServerSse

import agentlightning as agl
from agentlightning.metrics import read_metrics

SERVER = """
import sys
from mcp.server.fastmcp import FastMCP

server = FastMCP("passages", host="127.0.0.1", port=int(sys.argv[1]))


@server.tool(description="The passages that answer best.")
def retrieve(query: str) -> str:
    return "Oslo is the capital of Norway."


server.run(transport="sse")
"""
CONFIG: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {
        "train_files": "tiny.parquet",
        "val_files": "tiny.parquet",
        "train_batch_size": 2,
        "max_prompt_length": 4096,
        "max_response_length": 1024,
        "truncation": "error",
    },
    "actor_rollout_ref": {
        "rollout": {"n": 4, "multi_turn": {"format": "hermes"}, "name": "vllm", "gpu_memory_utilization": 0.4},
        "actor": {"ppo_mini_batch_size": 2, "optim": {"lr": 1e-6}, "clip_ratio_low": 0.2, "clip_ratio_high": 0.3},
        "model": {"path": "calc", "use_remove_padding": True},
    },
    "trainer": {
        "n_gpus_per_node": 1,
        "val_before_train": True,
        "test_freq": 1,
        "total_epochs": 1,
        "logger": ["console"],
    },
}


class Reader(agl.LitAgent[dict[str, Any]]):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    async def training_rollout_async(
        self, task: dict[str, Any], resources: agl.NamedResources, rollout: agl.Rollout
    ) -> float | None:
        llm = cast(agl.LLM, resources["main_llm"])
        async with MCPServerSse(name="passages", params={"url": self.url}) as server:
            agent = Agent(
                name="Assistant",
                instructions="Answer from the passages.",
                model=LitellmModel(model="hosted_vllm/" + llm.model, base_url=llm.endpoint),
                model_settings=ModelSettings(max_tokens=4096, temperature=0.7),
                mcp_servers=[server],
            )
            said = await Runner.run(agent, task["question"])
        # Not all alike, so that there is something to learn.
        return len(str(said.final_output)) % 7 / 7

    async def validation_rollout_async(
        self, task: dict[str, Any], resources: agl.NamedResources, rollout: agl.Rollout
    ) -> float | None:
        llm = cast(agl.LLM, resources["main_llm"])
        own = agl.LLM(endpoint=llm.endpoint, model=llm.model, sampling_parameters={"temperature": 0.7})
        return await self.training_rollout_async(task, {"main_llm": own}, rollout)


def served() -> tuple[subprocess.Popen[bytes], str]:
    """The MCP server in a process of its own, and its address, when it listens."""
    Path("server.py").write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "server.py", str(port)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as asked:
            if asked.connect_ex(("127.0.0.1", port)) == 0:
                return process, f"http://127.0.0.1:{port}/sse"
        time.sleep(0.1)
    raise TimeoutError("the MCP server does not listen")


if __name__ == "__main__":
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    agl.setup_logging()
    set_tracing_disabled(True)
    pd.DataFrame([{"question": f"Norway, {n}?", "answer": "Oslo"} for n in range(4)]).to_parquet("tiny.parquet")
    server, url = served()
    try:
        trainer = agl.Trainer(n_runners=4, algorithm=agl.VERL(CONFIG), adapter={"agent_match": None})
        tasks = pd.read_parquet("tiny.parquet").to_dict(orient="records")
        trainer.fit(Reader(url), train_dataset=tasks, val_dataset=tasks)
    finally:
        server.kill()
    rows = read_metrics(next(Path("runs").iterdir()) / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2], rows
    assert all(row["failed"] == 0 and row["updates"] > 0 and row["logprob_gap_max"] < 1e-3 for row in rows[1:]), rows
