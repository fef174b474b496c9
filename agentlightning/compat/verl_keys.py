"""The keys of VERL's nested configuration: what each means here. A table, and functions of a flat dictionary. Pure.

A key is mapped (`MAPPED`), has no meaning here and is listed (`NO_MEANING`, by the beginning of its name), or is
refused: by a rule of its own (`REFUSED`), or because nobody knows it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentlightning.compat.verl_trainer import OF_THE_TRAINER
from agentlightning.errors import ConfigError
from agentlightning.types.finding import counted

DUAL_CLIP_BOUND = 3.0
"""VERL's default for clip_ratio_c, and the only bound that `dual_clip` has."""
NEVER = 10**9
"""VERL's 0 and -1: no checkpoint between the first step and the last."""
LORA_ALPHA = 32
"""What an adapter's weights are multiplied with, over its rank."""
ESTIMATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("GRPO", {}),
    "gae": ("PPO", {}),
    "rloo": ("GRPO", {"advantage": "rloo"}),
    "reinforce_plus_plus": ("GRPO", {"advantage": "reinforce++"}),
    "reinforce_plus_plus_baseline": ("GRPO", {"advantage": "reinforce++baseline"}),
}
"""The algorithm of each, and its settings: in VERL an estimator changes the advantage and keeps the clipped loss."""
_COMPARE = ("grpo", "rloo", "reinforce_plus_plus_baseline")
"""Those that compare what has the same uid: with n=1 these are the calls of one rollout."""
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_AGGREGATION = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant"}
_LOSSES = {"vanilla": "dual_clip", "gspo": "gspo"}
"""VERL's vanilla loss is bounded below where the advantage is negative, by clip_ratio_c."""
_SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine"}
VERLS_GPUS_PER_NODE = 8
NODES, GPUS = "trainer.nnodes", "trainer.n_gpus_per_node"
OFFLOADS = tuple(f"actor_rollout_ref.actor.fsdp_config.{what}_offload" for what in ("param", "optimizer"))
SHARED_ROWS = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
CUT_LAYERS = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
ROLLOUT, ACTOR, MODEL = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor.", "actor_rollout_ref.model."

KIND_OF_KL = ACTOR + "kl_loss_type"
VAL = ROLLOUT + "val_kwargs."
GREEDY = VAL + "do_sample"
ENGINE, SHARE = ROLLOUT + "name", ROLLOUT + "gpu_memory_utilization"

DEFAULTS: dict[str, Any] = {
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
    "algorithm.adv_estimator": "gae",
    "algorithm.lam": 1.0,
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
}
"""VERL's own defaults, where they are not ours."""


def _same(value: Any) -> Any:
    return value


def _often(value: Any) -> int:
    return NEVER if int(value) <= 0 else int(value)


def _or_never(value: Any) -> int:
    return max(int(value), 0)


def _or_none(value: Any) -> Any:
    return value or None


def _one_of(choices: Mapping[str, str]) -> Callable[[Any], str]:
    def choose(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"is {value!r}; here it can be one of {', '.join(choices)}")
        return choices[value]

    return choose


def _device(value: Any) -> str:
    if value not in ("cuda", "cpu", "auto"):
        raise ValueError(f"is {value!r}; it can be cuda or cpu")
    return "cpu" if value == "cpu" else "auto"


def _cut(value: Any) -> bool:
    if value not in ("error", "truncate", "left", "right", "middle"):
        raise ValueError(f"is {value!r}; it can be 'error' or 'truncate'")
    return value != "error"


MAPPED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "data.train_batch_size": ("tasks_per_step", int),
    "data.truncation": ("cut_long_prompts", _cut),
    "data.seed": ("seed", int),
    ROLLOUT + "n": ("group_size", int),
    ROLLOUT + "temperature": ("temperature", float),
    ROLLOUT + "top_p": ("top_p", lambda v: 1.0 if v is None else float(v)),
    ROLLOUT + "top_k": ("top_k", lambda v: max(int(v or 0), 0)),
    ROLLOUT + "max_num_seqs": ("max_concurrency", int),
    ROLLOUT + "max_model_len": ("max_context", int),
    ACTOR + "ppo_epochs": ("update_epochs", int),
    ACTOR + "optim.lr": ("learning_rate", float),
    ACTOR + "optim.lr_scheduler_type": ("schedule", _one_of(_SCHEDULES)),
    ACTOR + "optim.warmup_style": ("schedule", _one_of(_SCHEDULES)),
    ACTOR + "optim.weight_decay": ("weight_decay", float),
    ACTOR + "grad_clip": ("max_grad_norm", float),
    ACTOR + "entropy_coeff": ("entropy_coef", float),
    KIND_OF_KL: ("kl_estimator", _one_of(_KL)),
    ACTOR + "clip_ratio_low": ("clip_low", float),
    ACTOR + "clip_ratio_high": ("clip_high", float),
    ACTOR + "loss_agg_mode": ("normalization", _one_of(_AGGREGATION)),
    ACTOR + "policy_loss.loss_mode": ("loss", _one_of(_LOSSES)),
    ACTOR + "ppo_max_token_len_per_gpu": ("tokens_per_batch", int),
    MODEL + "path": ("model", str),
    MODEL + "lora_rank": ("lora_rank", _or_none),
    MODEL + "enable_gradient_checkpointing": ("gradient_checkpointing", bool),
    "algorithm.gamma": ("gamma", float),
    "algorithm.lam": ("lam", float),
    "trainer.total_epochs": ("epochs", int),
    "trainer.total_training_steps": ("steps", _or_none),
    "trainer.test_freq": ("val_every", _or_never),
    "trainer.val_before_train": ("val_before", bool),
    VAL + "temperature": ("val_temperature", float),
    VAL + "n": ("val_repeats", int),
    "trainer.save_freq": ("save_every", _often),
    "trainer.critic_warmup": ("critic_warmup", int),
    "trainer.device": ("device", _device),
    "trainer.max_actor_ckpt_to_keep": ("keep_checkpoints", _same),
}
"""Keys that are one setting here."""

TOGETHER = {
    **OF_THE_TRAINER,
    ENGINE: "vllm: backend='vllm', on one GPU that this machine has, where vLLM is installed",
    SHARE: "with vLLM: backend_options={'gpu_memory_utilization': …}",
    GREEDY: "false: val_temperature=0",
    "data.max_prompt_length": "with data.max_response_length: max_context",
    "data.max_response_length": "with data.max_prompt_length: max_context",
    ACTOR + "ppo_mini_batch_size": "minibatches = train_batch_size / ppo_mini_batch_size",
    ACTOR + "clip_ratio": "clip_low and clip_high, unless they are given",
    ACTOR + "clip_ratio_c": "loss='dual_clip', whose bound it is (3)",
    ACTOR + "optim.lr_warmup_steps": "warmup_steps",
    ACTOR + "optim.lr_warmup_steps_ratio": "warmup_steps, as this share of trainer.total_training_steps",
    ACTOR + "use_kl_loss": "kl_coef, in the loss",
    ACTOR + "kl_loss_coef": "kl_coef, if use_kl_loss is true",
    "algorithm.adv_estimator": "GRPO with this advantage; gae: PPO",
    "algorithm.norm_adv_by_std_in_grpo": "false: advantage='drgrpo'",
    "algorithm.use_kl_in_reward": "kl_in='reward', with algorithm.kl_ctrl.kl_coef",
    "algorithm.kl_ctrl.kl_coef": "kl_coef, if use_kl_in_reward is true",
    NODES: "more than one: backend='ray', with a rank of the learner and an engine on each GPU",
    GPUS: "ranks, if the machines have enough GPUs",
    SHARED_ROWS: "more than one, on GPUs: verl's workers in bfloat16, which split each row among that many",
    CUT_LAYERS: "tensor_parallel, if the learner has that many ranks and is not verl's workers",
    OFFLOADS[0]: "true, with several ranks on GPUs: verl's workers, with offload",
    OFFLOADS[1]: "true, with several ranks on GPUs: verl's workers, with offload; with one: offload",
    ROLLOUT + "tensor_model_parallel_size": "on several nodes: the GPUs of an engine, which holds the whole model",
}
"""Keys that are read with others."""

_ENGINE = "the sampling engine decides"
_LEARNER = "the learner packs tokens into batches (tokens_per_batch)"
_PLACES = "the backend decides how and where to compute"
_TREE = "turns are trained as one tree of tokens, which covers both levels"
NO_MEANING: dict[str, str] = {
    ROLLOUT + "mode": _ENGINE,
    ROLLOUT + "data_parallel_size": _ENGINE,
    ROLLOUT + "multi_turn": "agents may take any number of turns",
    ROLLOUT + "engine_kwargs": _ENGINE,
    ROLLOUT + "enforce_eager": _ENGINE,
    ROLLOUT + "enable_chunked_prefill": _ENGINE,
    ROLLOUT + "free_cache_engine": _ENGINE,
    ROLLOUT + "max_num_batched_tokens": _ENGINE,
    ROLLOUT + "load_format": _ENGINE,
    ROLLOUT + "layered_summon": _ENGINE,
    ROLLOUT + "dtype": _ENGINE,
    ROLLOUT + "calculate_log_probs": "log-probs are always kept",
    ROLLOUT + "agent": "agents run in runners: Trainer(n_runners=…)",
    ROLLOUT + "log_prob": _LEARNER,
    ACTOR + "ppo_micro_batch_size": _LEARNER,
    ACTOR + "use_dynamic_bsz": _LEARNER,
    ACTOR + "fsdp_config": _PLACES,
    ACTOR + "megatron": _PLACES,
    ACTOR + "strategy": _PLACES,
    ACTOR + "use_torch_compile": _PLACES,
    ACTOR + "checkpoint": "checkpoints always have weights and optimizer",
    ACTOR + "shuffle": "whole groups stay together",
    "actor_rollout_ref.ref": _PLACES,
    "actor_rollout_ref.hybrid_engine": _PLACES,
    MODEL + "use_remove_padding": "nothing is padded",
    MODEL + "use_fused_kernels": _PLACES,
    MODEL + "use_liger": _PLACES,
    MODEL + "enable_activation_offload": _PLACES,
    "critic": "the critic is a regression on the policy's hidden states, without a learning rate",
    "reward_model": "rewards come from the agent",
    "custom_reward_function": "rewards come from the agent",
    "data.val_batch_size": "validation runs all tasks at once",
    "data.train_files": "tasks are passed to Trainer.fit",
    "data.val_files": "tasks are passed to Trainer.fit",
    "data.filter_overlong_prompts": "the agent makes the prompts",
    "data.prompt_key": "the agent gets each task unchanged",
    "data.reward_fn_key": "the agent gets each task unchanged",
    "data.image_key": "the agent gets each task unchanged",
    "data.return_raw_chat": "the agent gets each task unchanged",
    "data.dataloader_num_workers": "tasks are a list, without data loaders",
    "trainer.use_legacy_worker_impl": _PLACES,
    **dict.fromkeys(
        ("trainer.rollout_data_dir", "trainer.validation_data_dir"), "the run's store has all rollouts: agl export"
    ),
    "trainer.log_val_generations": "`agl show` prints the messages",
    "trainer.max_critic_ckpt_to_keep": "the critic is in the policy's checkpoints",
    "trainer.balance_batch": _LEARNER,
    "trainer.esi_redundant_time": _PLACES,
    "trainer.ray_wait_register_center_timeout": _PLACES,
    "algorithm.kl_ctrl": "the coefficient is fixed",
    "algorithm.pf_ppo": _LEARNER,
    "ray_init": _PLACES,
    "ray_kwargs": _PLACES,
    "global_profiler": _PLACES,
    "hydra": "Hydra is not used",
    "agentlightning.trace_aggregator": _TREE,
}
"""Keys, or what keys begin with, that have no meaning here."""

REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    ACTOR + "optim.min_lr_ratio": (lambda v: v in (0, None), "the rate always falls to zero; remove it"),
    ACTOR + "optim.num_cycles": (lambda v: v in (0.5, None), "the rate always falls once; remove it"),
    MODEL + "trust_remote_code": (lambda v: not v, "code in models is never run; save the model without it"),
    MODEL + "external_lib": (lambda v: v is None, "import it in your script"),
    MODEL + "override_config": (lambda v: not v, "change the model's config.json"),
    "reward_model.enable": (lambda v: not v, "call the reward model in the agent, and return its score"),
    "custom_reward_function.path": (lambda v: v is None, "return the reward from the agent"),
    "data.shuffle": (lambda v: v is not False, "tasks are always shuffled in each epoch; remove it"),
    ROLLOUT + "do_sample": (lambda v: v is not False, "a group's rollouts would all be equal; remove it"),
    VAL + "top_p": (lambda v: v in (None, 1), "remove it; set it in the agent's validation requests"),
    VAL + "top_k": (lambda v: v in (None, 0, -1), "remove it; set it in the agent's validation requests"),
    MODEL + "lora_alpha": (lambda v: v in (None, LORA_ALPHA), f"it is {LORA_ALPHA}: scale the learning rate instead"),
    MODEL + "target_modules": (lambda v: v in (None, "all-linear"), "adapters are on all linear layers; remove it"),
    "algorithm.kl_penalty": (lambda v: v in (None, "kl", "k1"), "in the reward it is always k1; remove it"),
    "algorithm.kl_ctrl.type": (lambda v: v in (None, "fixed"), "remove it; GRPO(kl_target=…) adapts the coefficient"),
    "trainer.default_hdfs_dir": (lambda v: v is None, "copy the run's folder there at the end"),
    "algorithm.use_pf_ppo": (lambda v: not v, "remove it; there is no equivalent"),
}
"""Keys that may have one value only: what is accepted, and what to do for another."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a configuration means here."""

    algorithm: str
    settings: dict[str, Any]
    ignored: dict[str, str]
    """Keys without a meaning, and why."""


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries under dotted keys. Raises ConfigError for what is no dictionary of names."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def understand(flat: Mapping[str, Any], gpus: Callable[[], int], has_vllm: Callable[[], bool] = bool) -> Meaning:
    """What the keys mean on a machine with so many GPUs, and vLLM or not; it is looked at only where it matters.

    Raises ConfigError that names each key that has to change, and how.
    """
    problems: list[str] = []
    ignored: dict[str, str] = {}
    settings: dict[str, Any] = {}
    flat = {**{key: value for key, value in DEFAULTS.items() if key not in flat}, **flat}
    for key, value in flat.items():
        try:
            if (why := _read(key, value, settings)) is not None:
                ignored[key] = why
        except (TypeError, ValueError) as error:
            problems.append(f"{key} {error}.")
    estimator = flat["algorithm.adv_estimator"]
    if estimator not in ESTIMATORS:
        problems.append(f"algorithm.adv_estimator is {estimator!r}; it can be one of {', '.join(ESTIMATORS)}.")
    if "model" not in settings:
        problems.append("actor_rollout_ref.model.path is missing: the model to train.")
    problems += _combine(flat, settings) + _bound(flat, settings) + _warm_up(flat, settings)
    in_loss = settings.get("kl_coef") and settings.get("kl_in") == "loss"
    if not in_loss and settings.pop("kl_estimator", None):
        ignored[KIND_OF_KL] = "no divergence counts in the loss"
    problems += _place(flat, settings, ignored, gpus)
    _cut_layers(flat, settings, ignored)
    _engine(flat, settings, ignored, gpus, has_vllm)
    if problems:
        raise ConfigError("VERL's configuration cannot be used as it is:\n" + "\n".join(f"  {p}" for p in problems))
    algorithm, own = ESTIMATORS[estimator]
    return Meaning(algorithm, {**own, **settings}, ignored)


def _read(key: str, value: Any, settings: dict[str, Any]) -> str | None:
    """Map one key, or say why it has no meaning. Raises ValueError for what is refused."""
    if key in REFUSED and not REFUSED[key][0](value):
        raise ValueError(f"is {value!r}: {REFUSED[key][1]}")
    if key in TOGETHER:
        return None
    if key in MAPPED:
        name, convert = MAPPED[key]
        if value is not None:
            settings[name] = convert(value)
        return None
    why = next((why for begin, why in NO_MEANING.items() if key == begin or key.startswith(begin)), None)
    if why is None and key not in REFUSED:
        raise ValueError("is not known; take it out, or say what it is to do by a setting of GRPO")
    return why


def _combine(flat: Mapping[str, Any], settings: dict[str, Any]) -> list[str]:
    """The keys that are read together; returns what is wrong with them."""
    problems: list[str] = []
    prompt, response = flat.get("data.max_prompt_length"), flat.get("data.max_response_length")
    if prompt is not None and response is not None:
        settings.setdefault("max_context", int(prompt) + int(response))
    elif prompt is not None or response is not None:
        problems.append("data.max_prompt_length and data.max_response_length go together; give both.")
    batch, mini = settings.get("tasks_per_step"), flat.get(ACTOR + "ppo_mini_batch_size")
    if mini is not None and int(mini) < 1:
        problems.append(f"{ACTOR}ppo_mini_batch_size is {mini!r}; it must be a whole number above 0.")
    elif batch is not None and mini is not None:
        settings["minibatches"] = max(1, math.ceil(batch / int(mini)))
    if flat.get(GREEDY) is False:
        settings["val_temperature"] = 0.0
    if settings.get("group_size") == 1 and flat.get("algorithm.adv_estimator") in _COMPARE:
        settings["group_by"] = "rollout"
    clip = flat.get(ACTOR + "clip_ratio")
    if clip is not None:
        settings.setdefault("clip_low", float(clip))
        settings.setdefault("clip_high", float(clip))
    if flat.get("algorithm.norm_adv_by_std_in_grpo") is False and flat.get("algorithm.adv_estimator") == "grpo":
        settings["advantage"] = "drgrpo"
    in_loss, in_reward = flat.get(ACTOR + "use_kl_loss"), flat.get("algorithm.use_kl_in_reward")
    if in_loss and in_reward:
        problems.append("use_kl_loss and use_kl_in_reward are both true; the divergence counts in one place.")
    elif in_loss:
        settings |= {"kl_coef": float(flat.get(ACTOR + "kl_loss_coef", 0.001)), "kl_in": "loss"}
        settings.setdefault("kl_estimator", "k3")
    elif in_reward:
        settings |= {"kl_coef": float(flat.get("algorithm.kl_ctrl.kl_coef", 0.001)), "kl_in": "reward"}
    return problems


def _place(
    flat: Mapping[str, Any], settings: dict[str, Any], ignored: dict[str, str], gpus: Callable[[], int]
) -> list[str]:
    """Over which processes learner and engines are spread; returns what is wrong with the keys.

    On several nodes every GPU has a rank of the learner and an engine, as in VERL; Ray lays them out. So it is on one
    node where verl's workers are asked for.
    """
    several = ROLLOUT + "tensor_model_parallel_size"
    given = {key: flat.get(key) for key in (NODES, GPUS, several)}
    problems = [
        f"{key} is {value!r}; it must be a whole number above 0."
        for key, value in {**given, **{key: flat.get(key) for key in (SHARED_ROWS, CUT_LAYERS)}}.items()
        if value is not None and (not isinstance(value, int) or value < 1)
    ]
    if problems:
        return problems
    nodes, per_node, split = given[NODES] or 1, given[GPUS] or 1, given[several] or 1
    ranks = nodes * (given[GPUS] or VERLS_GPUS_PER_NODE) if nodes > 1 else per_node
    here = nodes > 1 or (per_node > 1 and gpus() >= per_node)
    if not here and flat.get(OFFLOADS[1]) and settings.get("device") != "cpu" and gpus():
        settings["offload"] = True
    verls = _of_verls_workers(flat, settings, ignored, ranks if here else 1)
    if "sequence_parallel" in verls:
        settings["dtype"] = "bfloat16"  # FlashAttention, which it needs, knows no float32; VERL computes so by default
    if nodes > 1 or verls:
        options: dict[str, Any] = {"address": "auto"} if nodes > 1 else {}
        options |= {"engines": max(1, ranks // split), **verls}
        if settings.get("device") != "cpu":
            options |= {"gpus_per_rank": 0.5, "gpus_per_engine": 0.5}
        settings |= {"backend": "ray", "ranks": ranks, "backend_options": options}
        return []
    if split > 1:
        ignored[several] = "the engine holds the whole model"
    if per_node > 1 and (found := gpus()) < per_node:
        ignored[GPUS] = f"this machine has {counted(found, 'GPU') if found else 'no GPUs'}: the learner is one process"
    elif per_node > 1:
        settings["ranks"] = per_node
    return []


def _of_verls_workers(
    flat: Mapping[str, Any], settings: Mapping[str, Any], ignored: dict[str, str], ranks: int
) -> dict[str, Any]:
    """Options that only verl's workers have; what is asked for and cannot be is listed."""
    share, offloads = flat.get(SHARED_ROWS) or 1, [key for key in OFFLOADS if flat.get(key)]
    if settings.get("offload"):
        offloads.remove(OFFLOADS[1])
    options = {SHARED_ROWS: {"sequence_parallel": share} if share > 1 else {}}
    options |= {key: {"offload": True} for key in offloads}
    why = None
    if ranks == 1 or settings.get("device") == "cpu":
        why = "the learner is one process, or on CPUs"
    elif flat.get("algorithm.adv_estimator") == "gae":
        why = "verl's workers have no critic"
    if why is not None:
        ignored |= {key: why for key, given in options.items() if given}
        return {}
    return {name: value for given in options.values() for name, value in given.items()}


def _engine(
    flat: Mapping[str, Any],
    settings: dict[str, Any],
    ignored: dict[str, str],
    gpus: Callable[[], int],
    has_vllm: Callable[[], bool],
) -> None:
    """What samples: vLLM on one GPU, where it is wanted and installed; else our own engine, which is reported."""
    keys = [key for key in (ENGINE, SHARE) if flat.get(key) is not None]
    if flat.get(ENGINE, "vllm") != "vllm" or not keys:
        ignored |= dict.fromkeys(keys, "this package's engine samples")
    elif settings.get("backend") == "ray" or settings.get("ranks", 1) > 1:
        ignored |= dict.fromkeys(keys, "with several ranks this package's engine samples, unless GRPO says otherwise")
    elif settings.get("device") == "cpu" or not gpus() or not has_vllm():
        ignored |= dict.fromkeys(keys, "there is no GPU or no vLLM here: this package's engine samples")
    else:
        share = {} if flat.get(SHARE) is None else {"gpu_memory_utilization": float(flat[SHARE])}
        settings |= {"backend": "vllm", "backend_options": share}


def _cut_layers(flat: Mapping[str, Any], settings: dict[str, Any], ignored: dict[str, str]) -> None:
    """Ranks that share layers, once it is known how many there are."""
    layers = flat.get(CUT_LAYERS) or 1
    on_verl = {"offload", "sequence_parallel"} & set(settings.get("backend_options", {}))
    if layers > 1 and (on_verl or settings.get("ranks", 1) % layers):
        ignored[CUT_LAYERS] = "verl's workers keep layers whole" if on_verl else "the ranks are no multiple of it"
    elif layers > 1:
        settings["tensor_parallel"] = layers


def _bound(flat: Mapping[str, Any], settings: dict[str, Any]) -> list[str]:
    """The lower bound of the vanilla loss where the advantage is negative."""
    bound = flat.get(ACTOR + "clip_ratio_c")
    if bound in (None, DUAL_CLIP_BOUND) or settings.get("loss") != "dual_clip":
        return []
    return [
        f"{ACTOR}clip_ratio_c is {bound!r}; here it is {DUAL_CLIP_BOUND}. Take it out, or give GRPO a loss of yours."
    ]


def _warm_up(flat: Mapping[str, Any], settings: dict[str, Any]) -> list[str]:
    """The first steps, over which the learning rate rises: a number of them, or else a share of all."""
    steps, share = flat.get(ACTOR + "optim.lr_warmup_steps"), flat.get(ACTOR + "optim.lr_warmup_steps_ratio")
    if steps is not None and int(steps) >= 0:
        settings["warmup_steps"] = int(steps)
    elif share:
        if settings.get("steps") is None:
            return [f"{ACTOR}optim.lr_warmup_steps_ratio needs trainer.total_training_steps; or give lr_warmup_steps."]
        settings["warmup_steps"] = int(float(share) * settings["steps"])
    return []


_OTHER_WORDS = {
    "max_context": "data.max_prompt_length + data.max_response_length",
    "minibatches": ACTOR + "ppo_mini_batch_size",
    "advantage": "algorithm.adv_estimator",
    "kl_coef": ACTOR + "kl_loss_coef",
    "warmup_steps": ACTOR + "optim.lr_warmup_steps",
}
"""Settings that several keys make, and the key to name."""


def in_verls_words(message: str) -> str:
    """What is wrong with a setting, by the key that the user wrote."""
    keys = {name: key for key, (name, _) in reversed(MAPPED.items())} | _OTHER_WORDS
    named = "|".join(sorted(keys, key=len, reverse=True))
    # A setting's name that is a common word too is meant where a value stands behind it.
    pattern = rf"(?<![\w.])({named})(?=\s?=|\s\(|\sis\b|\smust\b|\sneeds\b)"
    return re.sub(pattern, lambda found: keys[found[1]], message)
