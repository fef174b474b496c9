"""As scripts for 0.3 are written: VERL's configuration, changed for a quick run, trains an agent on tasks in Parquet.

The original needs vLLM, verl and a GPU for it.
"""

import copy
import os
import re
from typing import Any, TypedDict, cast

import pyarrow as pa
import pyarrow.parquet as pq
from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning.env_var import LightningEnvVar, resolve_bool_env_var, resolve_str_env_var

CONFIG: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {
        "train_files": "train.parquet",
        "val_files": "test.parquet",
        "train_batch_size": 32,
        "max_prompt_length": 4096,
        "max_response_length": 2048,
        "truncation": "error",
    },
    "actor_rollout_ref": {
        "rollout": {
            "tensor_model_parallel_size": 1,
            "n": 4,
            "log_prob_micro_batch_size_per_gpu": 4,
            "multi_turn": {"format": "hermes"},
            "name": "vllm",
            "gpu_memory_utilization": 0.6,
            "engine_kwargs": {"vllm": {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}},
        },
        "actor": {
            "ppo_mini_batch_size": 32,
            "ppo_micro_batch_size_per_gpu": 4,
            "optim": {"lr": 1e-6},
            "use_kl_loss": False,
            "kl_loss_coef": 0.0,
            "kl_loss_type": "low_var_kl",
            "entropy_coeff": 0,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.3,
            "fsdp_config": {"param_offload": True, "optimizer_offload": True},
        },
        "ref": {"log_prob_micro_batch_size_per_gpu": 8, "fsdp_config": {"param_offload": True}},
        "model": {"path": "Qwen/Qwen2.5-1.5B-Instruct", "use_remove_padding": True},
    },
    "trainer": {
        "n_gpus_per_node": 1,
        "val_before_train": True,
        "critic_warmup": 0,
        "logger": ["console"],
        "project_name": "Sums",
        "experiment_name": "first",
        "nnodes": 1,
        "save_freq": 64,
        "test_freq": 32,
        "total_epochs": 2,
    },
}


class Problem(TypedDict):
    id: str
    question: str
    result: str


@agl.rollout
async def agent(task: Problem, llm: agl.LLM) -> None:
    client = AsyncOpenAI(base_url=llm.endpoint, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    said = await client.chat.completions.create(
        model=llm.model,
        messages=[{"role": "user", "content": task["question"]}],
        temperature=llm.sampling_parameters.get("temperature", 0.7),
        max_tokens=16,
    )
    text = said.choices[0].message.content or ""
    agl.emit_reward(float(task["result"] in re.findall(r"\d+", text)) - len(text) / 1000)


def quick() -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    config["actor_rollout_ref"]["model"]["path"] = "calc"
    config["actor_rollout_ref"]["rollout"]["n"] = 2
    config["data"]["train_batch_size"] = config["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] = 4
    config["trainer"].pop("save_freq")
    config["trainer"] |= {"total_epochs": 1, "total_training_steps": 1, "test_freq": 1}
    config["agentlightning"] = {"trace_aggregator": {"level": "trajectory", "trajectory_max_prompt_length": 2048}}
    return config


def problems(path: str) -> "agl.Dataset[Problem]":
    return cast("agl.Dataset[Problem]", pq.read_table(path).to_pylist())


if __name__ == "__main__":
    agl.setup_logging("INFO")
    assert resolve_bool_env_var(LightningEnvVar.AGL_MANAGED_STORE, fallback=True)
    assert resolve_str_env_var(LightningEnvVar.AGL_CURRENT_ROLE) is None
    rows = [{"id": str(n), "question": f"What is {n} + {n}?", "result": str(2 * n)} for n in range(6)]
    pq.write_table(pa.Table.from_pylist(rows[:4]), "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[4:]), "test.parquet")
    config = quick()
    trainer = agl.Trainer(n_runners=4, algorithm=agl.VERL(config), adapter={"agent_match": None})
    assert trainer.adapter.agent_match is None
    data = config["data"]
    trainer.fit(agent, train_dataset=problems(data["train_files"]), val_dataset=problems(data["val_files"]))
