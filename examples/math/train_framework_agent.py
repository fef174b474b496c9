"""The script that agent-framework-lab documents, on this example's calculator: an MCP server in each rollout, the lab's
tracer, VERL's configuration. What differs from its sample: the model, the calculator and the questions are those that
come with this project.

    python -m examples.math.train_framework_agent            # trains
    python -m examples.math.train_framework_agent --debug    # runs the agent once: OPENAI_BASE_URL, OPENAI_API_KEY
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from agent_framework import Agent, MCPStdioTool
from agent_framework.lab.lightning import AgentFrameworkTracer
from agent_framework.openai import OpenAIChatClient
from agentlightning.algorithm.verl import VERL

from agentlightning import LLM, Trainer, rollout

from .recipe import train_tasks, val_tasks
from .reward import score

SERVER = Path(__file__).with_name("server.py")
CONFIG: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo"},
    "data": {"train_batch_size": 4, "max_prompt_length": 640, "max_response_length": 128},
    "actor_rollout_ref": {
        "rollout": {
            "tensor_model_parallel_size": 1,
            "n": 4,
            "log_prob_micro_batch_size_per_gpu": 2,
            "multi_turn": {"format": "hermes"},
            "name": "vllm",
            "gpu_memory_utilization": 0.7,
        },
        "actor": {
            "ppo_mini_batch_size": 4,
            "ppo_micro_batch_size_per_gpu": 2,
            "optim": {"lr": 1e-4},
            "use_kl_loss": False,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.3,
            "fsdp_config": {"param_offload": True, "optimizer_offload": True},
        },
        "ref": {"log_prob_micro_batch_size_per_gpu": 2, "fsdp_config": {"param_offload": True}},
        # Theirs is a model of the Hub, "Qwen/Qwen2.5-1.5B-Instruct"; this one comes with the package.
        "model": {"path": "calc", "use_remove_padding": True, "enable_gradient_checkpointing": True},
    },
    "trainer": {
        "n_gpus_per_node": 1,
        "val_before_train": True,
        "logger": ["console"],
        "nnodes": 1,
        "test_freq": 4,
        "total_epochs": 2,
    },
}


@rollout
async def math_agent(task: dict[str, Any], llm: LLM) -> float:
    """Answer `task["question"]`; the reward says whether the answer is `task["answer"]`."""
    async with (
        MCPStdioTool(name="calculator", command=sys.executable, args=[str(SERVER)]) as calculator,
        Agent(
            client=OpenAIChatClient(
                model=llm.model, base_url=llm.endpoint, api_key=os.getenv("OPENAI_API_KEY") or "dummy"
            ),
            name="MathAgent",
            instructions="Answer the question. Use the calc tool for every operation.",
            default_options={"temperature": llm.sampling_parameters.get("temperature", 0.0), "max_tokens": 64},
        ) as agent,
    ):
        result = await agent.run(task["question"], tools=calculator)
    return score(result.text, task["answer"])


def debug(task: dict[str, Any]) -> None:
    """Run the agent on one task, with a model that any server has."""
    llm = LLM(model=os.getenv("OPENAI_MODEL", "gpt-4o-mini"), endpoint=os.environ["OPENAI_BASE_URL"])
    print(f"{task['question']} Reward: {asyncio.run(math_agent(task, llm))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--debug", action="store_true", help="run the agent once, without training")
    parser.add_argument("--train", type=Path, help='lines of {"question", "answer"}; without it, made ones')
    parser.add_argument("--val", type=Path, help="the same, which are not trained on")
    given = parser.parse_args()
    train, val = (
        [json.loads(line) for line in file.read_text().splitlines()] if file else made
        for file, made in ((given.train, train_tasks()[:64]), (given.val, val_tasks()[:16]))
    )
    if given.debug:
        debug(train[0])
        return
    trainer = Trainer(algorithm=VERL(CONFIG), tracer=AgentFrameworkTracer(), n_workers=2)
    trainer.fit(math_agent, train, val_data=val)


if __name__ == "__main__":
    main()
