"""The command of a public fork that trains werewolf players: its keys as they are, on the model that ships.

A rollout is a game, `rollout.n=1`, and the agent returns triplets of one camp, each with a reward of its own: what is
compared are the calls of one game.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.metrics import read_metrics

GAME = """
import agentlightning as agl
from openai import AsyncOpenAI

@agl.rollout
async def game(task, llm):
    client = AsyncOpenAI(base_url=llm.endpoint, api_key="dummy")
    given = []
    for turn, seat in enumerate(("wolf", "seer", "wolf", "seer", "wolf")):
        ask = [{"role": "user", "content": f"{seat}: what is {task['seed']} + {turn}?"}]
        said = await client.chat.completions.create(model=llm.model, messages=ask, max_tokens=12)
        if seat == "wolf":
            reward = (15.0, 10.0, -5.0)[turn // 2]
            given.append(agl.Triplet(prompt="", response="", reward=reward, metadata={"response_id": said.id}))
    return given
"""
SCRIPT = """
algorithm.adv_estimator=grpo data.train_files=train.jsonl data.val_files=test.jsonl
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.actor.ulysses_sequence_parallel_size=2
trainer.n_gpus_per_node=8 data.train_batch_size=1 actor_rollout_ref.rollout.n=1
actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.multi_turn.format=hermes
actor_rollout_ref.model.path=calc data.max_prompt_length=15360 data.max_response_length=1024 data.truncation=middle
trainer.val_before_train=True actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.000
actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.clip_ratio_low=0.2
actor_rollout_ref.actor.clip_ratio_high=0.3 actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.4
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 actor_rollout_ref.ref.fsdp_config.param_offload=True
algorithm.use_kl_in_reward=False trainer.default_local_dir=run trainer.rollout_data_dir=rollout
trainer.resume_mode=auto trainer.critic_warmup=0 trainer.logger=[console,tensorboard]
trainer.project_name=AgentLightning trainer.experiment_name=werewolf trainer.nnodes=1 trainer.save_freq=1
trainer.test_freq=0 trainer.total_epochs=1
"""


def command(**changes: str) -> list[str]:
    """As its shell script gives it; without TensorBoard where that is not installed."""
    tensorboard = importlib.util.find_spec("tensorboard") is not None
    return SCRIPT.replace(",tensorboard", ",tensorboard" if tensorboard else "").split() + [
        f"{key}={value}" for key, value in changes.items()
    ]


def train(folder: Path, agent: str) -> None:
    (folder / "game.py").write_text(GAME)
    for part, seeds in {"train": range(2), "test": range(1)}.items():
        (folder / f"{part}.jsonl").write_text("".join(json.dumps({"seed": seed}) + "\n" for seed in seeds))
    typed = [sys.executable, "-m", "agentlightning.verl", f"agent=game.py:{agent}", *command()]
    done = subprocess.run(typed, cwd=folder, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def calls_of(store_file: Path) -> dict[str, Any]:
    store = agl.SqliteLightningStore(store_file)
    ids = [r.rollout_id for r in await store.query_rollouts(limit=-1) if r.mode is agl.RolloutMode.TRAIN]
    found = dict(await store.query_calls(ids))
    await store.close()
    return found


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_two_games_train_what_one_camp_said(tmp_path: Path) -> None:
    train(tmp_path, "game")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row.get("val_reward") is not None for row in rows] == [True, False, False], "test_freq=0"
    games = asyncio.run(calls_of(tmp_path / "run" / "store.db"))
    assert [len(calls) for calls in games.values()] == [5, 5]
    wolves = sum(len(c.response_ids) for calls in games.values() for c in calls[::2])
    assert sum(row["trained_tokens"] for row in rows[1:]) == wolves, "three calls of each game, and no others"
    assert all(row["grad_norm"] > 0 for row in rows[1:]), "they are compared with each other"
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) >= 2, "save_freq=1"


def test_its_keys_are_read() -> None:
    from agentlightning.compat.verl import VERL, _override  # pyright: ignore[reportPrivateUsage]

    made = VERL(dict(map(_override, command())))
    assert (made.group_size, made.group_by, made.tasks_per_step, made.save_every) == (1, "rollout", 1, 1)
    assert made.trainer_defaults.run_dir == Path("run")
