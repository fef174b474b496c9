"""A script as agent-framework-lab documents them: its tracer, VERL's configuration, an async agent with an MCP tool."""

import argparse
import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import TypedDict, cast

from agent_framework import Agent
from agent_framework.lab.lightning import AgentFrameworkTracer
from agent_framework.openai import OpenAIChatClient
from agentlightning.algorithm.verl import VERL
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from agentlightning import LLM, Dataset, Rollout, Trainer, rollout

SERVER = Path(__file__).parent.parent / "mcp_server.py"


class MathProblem(TypedDict):
    question: str
    answer: float


@rollout
async def math_agent(task: MathProblem, llm: LLM) -> float:
    server = StdioServerParameters(command=sys.executable, args=[str(SERVER)])
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        await session.initialize()

        async def calc(a: float, op: str, b: float) -> str:
            """One operation on two numbers."""
            return (await session.call_tool("calc", {"a": a, "op": op, "b": b})).content[0].text

        agent = Agent(
            client=OpenAIChatClient(model=llm.model, api_key="dummy", base_url=llm.endpoint),
            name="MathAgent",
            instructions="Answer the question. Use the calc tool for every operation.",
            tools=[calc],
            default_options={"temperature": llm.sampling_parameters.get("temperature", 0.0), "max_tokens": 64},
        )
        result = await agent.run(task["question"])
    numbers = re.findall(r"-?\d+\.?\d*", result.text)
    right = bool(numbers) and abs(float(numbers[-1]) - task["answer"]) < 1e-6
    return 1.0 if right else 0.1 * (len(numbers) > 0)


def config() -> dict:
    return {
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "data": {"train_batch_size": 2, "max_prompt_length": 768, "max_response_length": 256},
        "actor_rollout_ref": {
            "rollout": {
                "tensor_model_parallel_size": 1,
                "n": 4,
                "log_prob_micro_batch_size_per_gpu": 4,
                "multi_turn": {"format": "hermes"},
                "name": "vllm",
                "gpu_memory_utilization": 0.6,
            },
            "actor": {
                "ppo_mini_batch_size": 2,
                "ppo_micro_batch_size_per_gpu": 4,
                "optim": {"lr": 1e-6},
                "use_kl_loss": False,
                "kl_loss_coef": 0.0,
                "entropy_coeff": 0,
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.3,
                "fsdp_config": {"param_offload": True, "optimizer_offload": True},
            },
            "ref": {"log_prob_micro_batch_size_per_gpu": 8, "fsdp_config": {"param_offload": True}},
            "model": {"path": "calc", "use_remove_padding": True, "enable_gradient_checkpointing": True},
        },
        "trainer": {
            "n_gpus_per_node": 1,
            "val_before_train": True,
            "critic_warmup": 0,
            "logger": ["console"],
            "project_name": "AgentLightning",
            "experiment_name": "math",
            "nnodes": 1,
            "test_freq": 1,
            "total_epochs": 1,
        },
    }


def load(file: str) -> Dataset[MathProblem]:
    return cast(Dataset[MathProblem], [json.loads(line) for line in Path(file).read_text().splitlines()])


def debug(tasks: Dataset[MathProblem]) -> None:
    """Run the agent once, against whatever server the environment names."""
    llm = LLM(endpoint=os.environ["OPENAI_BASE_URL"], model=os.environ["OPENAI_MODEL"], sampling_parameters={})
    made = Rollout(rollout_id="dummy", input=tasks[0])
    print("reward", asyncio.run(math_agent(made.input, llm)))  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("tasks")
    options = parser.parse_args()
    tasks = load(options.tasks)
    if options.debug:
        debug(tasks)
        return
    trainer = Trainer(algorithm=VERL(config()), tracer=AgentFrameworkTracer(), n_workers=2)
    trainer.fit(math_agent, tasks[:4], val_data=tasks[4:6])


if __name__ == "__main__":
    main()
