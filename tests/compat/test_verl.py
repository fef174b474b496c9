"""VERL's nested configuration: every key is mapped, listed once, or refused by name with what to do."""

# What is old is there while the program runs, not for the checker.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
import copy
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agentlightning.algorithm.verl import VERL

import agentlightning as agl
from agentlightning.backend.ray.options import parse_options
from agentlightning.compat.verl_keys import (
    CUT_LAYERS,
    DUAL_CLIP_BOUND,
    ENGINE,
    MAPPED,
    NO_MEANING,
    OFFLOADS,
    REFUSED,
    SHARE,
    SHARED_ROWS,
    TOGETHER,
    flatten,
    understand,
)
from agentlightning.learner import loss as learner_loss
from agentlightning.metrics import read_metrics

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {"train_batch_size": 32, "max_prompt_length": 4096, "max_response_length": 2048, "truncation": "truncate"},
    "actor_rollout_ref": {
        "rollout": {
            "tensor_model_parallel_size": 1,
            "n": 4,
            "name": "vllm",
            "temperature": 0.9,
            "gpu_memory_utilization": 0.6,
            "log_prob_micro_batch_size_per_gpu": 4,
            "multi_turn": {"format": "hermes"},
            "engine_kwargs": {"vllm": {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}},
        },
        "actor": {
            "ppo_mini_batch_size": 16,
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
        "experiment_name": "calc_x",
        "nnodes": 1,
        "save_freq": 64,
        "test_freq": 32,
        "total_epochs": 2,
    },
    "agentlightning": {"trace_aggregator": {"level": "trajectory"}, "port": 9999},
}
"""What the documented scripts give, but for the trackers, whose packages are installed apart."""


def changed(path: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    *outer, last = path.split(".")
    at = config
    for part in outer:
        at = at.setdefault(part, {})
    at[last] = value
    return config


def test_the_documented_configuration_becomes_settings(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = VERL(CONFIG)
    assert type(made) is agl.GRPO
    wanted = {
        "model": "calc",
        "tasks_per_step": 32,
        "group_size": 4,
        "max_context": 6144,
        "cut_long_prompts": True,
        "temperature": 0.9,
        "minibatches": 2,
        "learning_rate": 1e-6,
        "loss": "dual_clip",
        "clip_low": 0.2,
        "clip_high": 0.3,
        "entropy_coef": 0.0,
        "kl_coef": 0.0,
        "gradient_checkpointing": True,
        "save_every": 64,
        "val_every": 32,
        "epochs": 2,
    }
    assert {name: getattr(made, name) for name in wanted} == wanted
    (said,) = caplog.records
    listed = {line.strip().partition(":")[0] for line in said.getMessage().splitlines()[1:]}
    known = {*MAPPED, *TOGETHER}
    assert listed == {key for key in flatten(CONFIG) if key not in known} | {*OFFLOADS, ENGINE, SHARE}, (
        "all others, once"
    )


@pytest.mark.parametrize(
    ("path", "value", "setting", "meaning"),
    [
        ("algorithm.adv_estimator", "rloo", "advantage", "rloo"),
        ("algorithm.adv_estimator", "reinforce_plus_plus", "advantage", "reinforce++"),
        ("algorithm.adv_estimator", "gae", "credit", "token_gae"),
        ("algorithm.norm_adv_by_std_in_grpo", False, "advantage", "drgrpo"),
        ("actor_rollout_ref.actor.use_kl_loss", True, "kl_in", "loss"),
        ("algorithm.use_kl_in_reward", True, "kl_coef", 0.001),
        ("actor_rollout_ref.actor.loss_agg_mode", "seq-mean-token-mean", "normalization", "sequence"),
        ("actor_rollout_ref.model.lora_rank", 8, "lora_rank", 8),
        ("actor_rollout_ref.model.lora_rank", 0, "lora_rank", None),
        ("trainer.test_freq", -1, "val_every", 0),
        ("trainer.test_freq", 0, "val_every", 0),
        ("trainer.save_freq", 0, "save_every", 10**9),
        ("trainer.val_before_train", False, "val_before", False),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", 0.3, "val_temperature", 0.3),
        ("actor_rollout_ref.rollout.val_kwargs.n", 4, "val_repeats", 4),
        ("actor_rollout_ref.rollout.val_kwargs.do_sample", False, "val_temperature", 0.0),
        ("actor_rollout_ref.rollout.n", 1, "group_by", "rollout"),
        ("actor_rollout_ref.rollout.n", 2, "group_by", "task"),
        ("data.train_files", "train.parquet", "group_size", 4),
        ("trainer.total_training_steps", 7, "steps", 7),
        ("trainer.device", "cuda", "device", "auto"),
        ("trainer.device", "cpu", "device", "cpu"),
        ("data.truncation", "error", "cut_long_prompts", False),
        ("actor_rollout_ref.actor.clip_ratio_c", 3.0, "loss", "dual_clip"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "gspo", "loss", "gspo"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps", 5, "warmup_steps", 5),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps", -1, "warmup_steps", 0),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type", "cosine", "schedule", "cosine"),
        ("actor_rollout_ref.actor.optim.warmup_style", "constant", "schedule", "constant"),
    ],
)
def test_a_key_changes_its_setting(path: str, value: Any, setting: str, meaning: Any) -> None:
    assert getattr(VERL(changed(path, value)), setting) == meaning


@pytest.mark.parametrize(
    ("gpus", "vllm", "name", "used"),
    [(1, True, "vllm", True), (1, False, "vllm", False), (0, True, "vllm", False), (1, True, "sglang", False)],
)
def test_vllm_samples_with_its_share_of_the_gpu_where_it_can(gpus: int, vllm: bool, name: str, used: bool) -> None:
    """Where it cannot, that is said."""
    flat = flatten(CONFIG) | {"actor_rollout_ref.rollout.name": name, OFFLOADS[0]: False, OFFLOADS[1]: False}
    meaning = understand(flat, lambda: gpus, lambda: vllm)
    made = agl.GRPO(**meaning.settings)
    options = {"gpu_memory_utilization": 0.6} if used else {}
    assert (made.backend, made.backend_options) == ("vllm" if used else "embedded", options)
    assert ("actor_rollout_ref.rollout.gpu_memory_utilization" in meaning.ignored) != used


def test_what_is_the_trainers_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = agl.Trainer(algorithm=VERL(changed("agentlightning.port", 9998)))
    assert trainer.port == 9998
    assert trainer.run_dir.name.startswith("AgentLightning-calc_x-")
    folder = changed("trainer.default_local_dir", "checkpoints/mine")
    assert agl.Trainer(algorithm=VERL(folder)).run_dir == Path("checkpoints/mine")
    assert agl.Trainer(algorithm=VERL(folder), run_dir="other").run_dir == Path("other"), "the trainer's own word wins"


def test_trackers_are_the_trainers_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    asked = changed("trainer.logger", ["console", "tensorboard"])
    try:
        import tensorboard as _  # pyright: ignore[reportMissingImports]  # noqa: F401
    except ImportError:
        with pytest.raises(agl.ConfigError, match=r"trainer.logger asks for 'tensorboard'.*pip install tensorboard"):
            VERL(asked)
        return
    from agentlightning.metrics.trackers import TensorBoardSink

    assert [type(sink) for sink in agl.Trainer(algorithm=VERL(asked)).sinks] == [TensorBoardSink]
    assert [type(sink) for sink in agl.Trainer(algorithm=agl.Baseline(), sinks=["tensorboard"]).sinks] == [
        TensorBoardSink
    ]


def test_a_share_of_warm_up_is_of_all_steps() -> None:
    config = changed("trainer.total_training_steps", 40)
    config["actor_rollout_ref"]["actor"]["optim"] |= {"lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.1}
    assert VERL(config).warmup_steps == 4


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("trainer.nnodes", "two", "whole number above 0"),
        ("trainer.n_gpus_per_node", 0, "whole number above 0"),
        ("data.shuffle", False, "in each epoch"),
        ("actor_rollout_ref.rollout.do_sample", False, "would all be equal"),
        ("actor_rollout_ref.rollout.val_kwargs.top_p", 0.9, "validation requests"),
        ("actor_rollout_ref.rollout.val_kwargs.top_k", 20, "validation requests"),
        ("actor_rollout_ref.model.lora_alpha", 64, "learning rate"),
        ("actor_rollout_ref.model.target_modules", ["q_proj"], "all linear layers"),
        ("algorithm.kl_penalty", "low_var_kl", "always k1"),
        ("algorithm.kl_ctrl.type", "adaptive", "kl_target"),
        ("trainer.default_hdfs_dir", "hdfs://x", "copy"),
        ("trainer.device", "npu", "cuda or cpu"),
        ("algorithm.gamma", 0.9, "no effect here"),
        ("trainer.resume_mode", "always", "auto, disable or resume_path"),
        ("trainer.resume_mode", "resume_path", "trainer.resume_from_path"),
        ("trainer.logger", ["swanlab"], "tensorboard"),
        ("actor_rollout_ref.rollout.temperature", -1, "above 0"),
        ("actor_rollout_ref.actor.grad_clip", -1, "at least 0"),
        ("trainer.critic_warmup", 5, "it needs credit="),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", 0.5, "whole number"),
        ("reward_model.enable", True, "in the agent"),
        ("algorithm.adv_estimator", "remax", "it can be one of grpo"),
        ("actor_rollout_ref.actor.loss_agg_mode", "seq-mean-token-sum", "can be one of"),
        ("actor_rollout_ref.actor.clip_ratio_c", 10.0, "loss of yours"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", 0.1, "needs trainer.total_training_steps"),
        ("actor_rollout_ref.actor.optim.min_lr_ratio", 0.1, "falls to zero"),
        ("data.trian_batch_size", 4, "not known"),
        ("actor_rollout_ref.model.trust_remote_code", True, "is never run"),
    ],
)
def test_a_key_that_would_be_missed_is_refused_by_name(path: str, value: Any, words: str) -> None:
    with pytest.raises(agl.ConfigError) as error:
        VERL(changed(path, value))
    assert path in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("trainer", "split", "gpus", "backend", "ranks", "options"),
    [
        ({"nnodes": 1, "n_gpus_per_node": 1}, 1, 0, "embedded", 1, {}),
        ({"nnodes": 1, "n_gpus_per_node": 8}, 2, 0, "embedded", 1, {}),
        (
            {"nnodes": 1, "n_gpus_per_node": 4},
            1,
            8,
            "ray",
            4,
            {"engines": 4, "offload": True, "gpus_per_rank": 0.5, "gpus_per_engine": 0.5},
        ),
        ({"nnodes": 1, "n_gpus_per_node": 8}, 1, 4, "embedded", 1, {}),
        (
            {"nnodes": 2, "n_gpus_per_node": 4},
            2,
            0,
            "ray",
            8,
            {"address": "auto", "engines": 4, "offload": True, "gpus_per_rank": 0.5, "gpus_per_engine": 0.5},
        ),
        ({"nnodes": 3, "n_gpus_per_node": 1, "device": "cpu"}, 1, 0, "ray", 3, {"address": "auto", "engines": 3}),
    ],
)
def test_nodes_and_gpus_say_where_it_computes(
    trainer: dict[str, Any], split: int, gpus: int, backend: str, ranks: int, options: dict[str, Any]
) -> None:
    flat = flatten(CONFIG) | {f"trainer.{key}": value for key, value in trainer.items()}
    flat["actor_rollout_ref.rollout.tensor_model_parallel_size"] = split
    meaning = understand(flat, lambda: gpus)
    made = agl.GRPO(**meaning.settings)
    assert (made.backend, made.ranks, made.backend_options) == (backend, ranks, options)
    unused = backend == "embedded" and trainer["n_gpus_per_node"] > ranks
    assert ("trainer.n_gpus_per_node" in meaning.ignored) == unused
    if backend == "ray":
        parse_options(options)


@pytest.mark.parametrize(
    ("changes", "on_verl", "listed"),
    [
        ({}, True, set()),
        (dict.fromkeys(OFFLOADS, False), False, set()),
        (dict.fromkeys(OFFLOADS, False) | {SHARED_ROWS: 2}, True, set()),
        ({SHARED_ROWS: 2, "actor_rollout_ref.model.lora_rank": 8}, True, set()),
        ({SHARED_ROWS: 2, "trainer.device": "cpu"}, False, {SHARED_ROWS, *OFFLOADS}),
        ({"algorithm.adv_estimator": "gae"}, False, set(OFFLOADS)),
    ],
)
def test_offload_and_shared_rows_choose_verls_workers(changes: dict[str, Any], on_verl: bool, listed: set[str]) -> None:
    """Where those can do what else is asked for; otherwise it is said that they change nothing."""
    meaning = understand(flatten(CONFIG) | {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 4} | changes, lambda: 0)
    options = parse_options(meaning.settings["backend_options"])
    assert options.on_verl == on_verl
    assert options.sequence_parallel == (changes.get(SHARED_ROWS, 1) if on_verl else 1)
    assert (meaning.settings.get("dtype") == "bfloat16") == (options.sequence_parallel > 1)
    assert {*OFFLOADS, SHARED_ROWS} & set(meaning.ignored) == listed


@pytest.mark.parametrize(
    ("changes", "shared", "listed"),
    [
        ({CUT_LAYERS: 2}, 2, set()),
        ({CUT_LAYERS: 3}, 1, {CUT_LAYERS}),
        ({CUT_LAYERS: 2, SHARED_ROWS: 2}, 1, {CUT_LAYERS}),
        ({CUT_LAYERS: 1}, 1, set()),
    ],
)
def test_megatrons_tensor_parallel_size_cuts_layers(changes: dict[str, int], shared: int, listed: set[str]) -> None:
    places = {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 4, **dict.fromkeys(OFFLOADS, False)}
    meaning = understand(flatten(CONFIG) | places | changes, lambda: 0)
    assert agl.GRPO(**meaning.settings).tensor_parallel == shared
    assert {CUT_LAYERS} & set(meaning.ignored) == listed


@pytest.mark.parametrize(("gpus", "device", "ours"), [(1, "auto", True), (1, "cpu", False), (0, "auto", False)])
def test_one_gpu_keeps_its_optimiser_in_the_machines_memory(gpus: int, device: str, ours: bool) -> None:
    """Where there is a GPU; the weights are not offloaded, which is said."""
    one = {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 1, "trainer.device": device}
    meaning = understand(flatten(CONFIG) | one, lambda: gpus)
    assert agl.GRPO(**meaning.settings).offload == ours
    assert set(OFFLOADS) & set(meaning.ignored) == ({OFFLOADS[0]} if ours else set(OFFLOADS))


def test_all_problems_are_said_at_once() -> None:
    config = changed("reward_model.enable", True)
    del config["actor_rollout_ref"]["model"]
    config["data"]["nonsense"] = {"a": 1}
    with pytest.raises(agl.ConfigError) as error:
        VERL(config)
    assert [line.split()[0] for line in str(error.value).splitlines()[1:]] == [
        "data.nonsense.a",
        "reward_model.enable",
        "actor_rollout_ref.model.path",
    ]


def test_what_is_not_said_has_verls_defaults() -> None:
    made = VERL(
        {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 2, "actor_rollout_ref.model.path": "calc"}
    )
    assert (made.learning_rate, made.clip_low, made.clip_high, made.epochs) == (1e-6, 0.2, 0.2, 30)


def test_no_key_is_in_two_tables() -> None:
    assert not set(MAPPED) & set(TOGETHER)
    assert not (set(MAPPED) | set(TOGETHER)) & set(REFUSED)
    assert not (set(MAPPED) | set(TOGETHER)) & set(NO_MEANING)


def test_the_bound_is_that_of_the_loss() -> None:
    assert learner_loss.DUAL_CLIP == DUAL_CLIP_BOUND


def test_classes_of_verls_own_trainer_are_refused() -> None:
    with pytest.raises(agl.ConfigError, match="trainer_cls= is not kept"):
        VERL(CONFIG, trainer_cls=object)


AGENT = """
import agentlightning as agl
from openai import AsyncOpenAI

@agl.rollout
async def agent(task, llm, rollout):
    client = AsyncOpenAI(base_url=llm.endpoint, api_key="dummy")
    training = rollout.mode == "train"
    assert llm.sampling_parameters == {"temperature": 0.9 if training else 0.4}, llm.sampling_parameters
    messages = [{"role": "user", "content": task["question"]}]
    said = await client.chat.completions.create(model=llm.model, messages=messages)
    return float(len(said.choices[0].message.content or "") % 2)
"""


def temperatures(run: Path) -> dict[str, set[float]]:
    """What was sampled with, by mode."""

    async def read() -> dict[str, set[float]]:
        store = agl.SqliteLightningStore(run / "store.db")
        found: dict[str, set[float]] = {}
        for rollout in await store.query_rollouts(limit=-1):
            for span in await store.query_spans(rollout.rollout_id):
                if "gen_ai.request.temperature" in span.attributes:
                    found.setdefault(str(rollout.mode), set()).add(span.attributes["gen_ai.request.temperature"])
        await store.close()
        return found

    return asyncio.run(read())


@pytest.mark.timeout(230)
@pytest.mark.slow
def test_the_command_trains(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    tasks = [json.dumps({"question": f"What is {n} + 1?"}) for n in range(4)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(tasks))
    command = [sys.executable, "-m", "agentlightning.verl", "agent=agent.py:agent", "data.train_files=tasks.jsonl"]
    command.append("data.val_files=tasks.jsonl")
    settings = {
        "+algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": "calc",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.temperature": 0.9,
        "data.train_batch_size": 2,
        "trainer.total_training_steps": 1,
        "trainer.default_local_dir": "run",
        "data.max_prompt_length": 256,
        "data.max_response_length": 64,
        "trainer.val_before_train": "False",
        "trainer.test_freq": 1,
        "actor_rollout_ref.rollout.val_kwargs.temperature": 0.4,
    }
    command += [f"{key}={value}" for key, value in settings.items()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["step"] == 1, "nothing is validated before"
    assert row["val_reward"] is not None
    assert temperatures(tmp_path / "run") == {"train": {0.9}, "val": {0.4}}


@pytest.mark.slow
def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentlightning.verl", "algorithm.adv_estimator=grpo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "data.train_files is missing" in done.stderr
    assert "Traceback" not in done.stderr
