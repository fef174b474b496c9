"""Validation of a training run's settings: numbers out of range, settings nothing uses, settings at odds.

Everything is refused when the algorithm is made, with a message that says what to do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from os import PathLike
from typing import Any, Literal, get_args, get_origin, get_type_hints

from agentlightning.algorithm.advantage import ADVANTAGES
from agentlightning.algorithm.checkpoint_copy import check_url
from agentlightning.algorithm.modes import CREDIT_MODES
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.algorithm.units import Use
from agentlightning.errors import ConfigError
from agentlightning.learner.base import DTYPES
from agentlightning.learner.catalog import LOSSES, check_loss
from agentlightning.types import Outcome, RolloutConfig

AT_LEAST: dict[str, float] = {
    **dict.fromkeys(("group_size", "tasks_per_step", "minibatches", "epochs", "steps", "update_epochs"), 1),
    **dict.fromkeys(("overlong_tokens", "max_calls", "max_tokens", "lora_rank", "max_context", "max_concurrency"), 1),
    **dict.fromkeys(("tokens_per_batch", "save_every", "keep_checkpoints"), 1),
    **dict.fromkeys(("val_repeats", "reference_every", "ranks", "tensor_parallel", "replay_size"), 1),
    **dict.fromkeys(("baseline_decay", "replay", "replay_priority", "adam_beta1", "adam_beta2"), 0),
    **dict.fromkeys(("dynamic_sampling", "max_staleness", "check_packing_every", "overlong_margin", "seed"), 0),
    **dict.fromkeys(("gradient_noise_every", "flat_steps", "critic_warmup", "warmup_steps", "val_every"), 0),
    **dict.fromkeys(("learning_rate", "weight_decay", "max_grad_norm"), 0),
    **dict.fromkeys(("top_k", "min_p", "val_temperature"), 0),
    **dict.fromkeys(("clip_low", "clip_high", "kl_coef", "correction_floor", "gamma", "lam"), 0),
}
ABOVE_ZERO = (
    "top_p",
    *("max_kl", "temperature", "correction_cap", "correction_veto", "kl_target"),
    *("max_logprob_gap", "dpo_beta", "quorum", "stall_seconds", "reference_share"),
)
AT_MOST: dict[str, float] = {
    "gamma": 1,
    "lam": 1,
    "quorum": 1,
    "temperature": 10,
    "val_temperature": 10,
    "top_p": 1,
    "min_p": 1,
    "baseline_decay": 1,
    "reference_share": 1,
    "adam_beta1": 0.9999,
    "adam_beta2": 0.999999,
}

Asks = Callable[[TrainingSettings], bool]


def _known(names: Mapping[str, Any], has: Callable[[Any], bool] = lambda _: True) -> str:
    return " or ".join(repr(name) for name, one in names.items() if has(one))


_CRITIC: tuple[Asks, str] = (lambda s: s.credit_mode.critic, f"credit={_known(CREDIT_MODES, lambda m: m.critic)} (PPO)")
_CLIPS: tuple[Asks, str] = (
    lambda s: s.loss_spec.clips or s.loss_spec.own,
    f"a loss that clips: {_known(LOSSES, lambda one: one.clips)}",
)
_CORRECTED: tuple[Asks, str] = (lambda s: s.correction_kind is not None, "a correction, as with max_staleness")
USED_WITH: dict[str, tuple[Asks, str]] = {
    "gamma": (lambda s: s.credit_mode.turns, f"credit={_known(CREDIT_MODES, lambda m: m.turns)}"),
    "lam": _CRITIC,
    "critic_warmup": _CRITIC,
    "advantage": (lambda s: s.credit_mode.compares, f"credit={_known(CREDIT_MODES, lambda m: m.compares)}"),
    "teacher": (lambda s: s.credit_mode.teacher, "credit='teacher', as agl.Distill has it"),
    "teacher_url": (lambda s: s.credit_mode.teacher, "credit='teacher', as agl.Distill has it"),
    "hint": (
        lambda s: s.credit_mode.teacher and s.teacher_url is None,
        "a teacher that is loaded here, as agl.SelfDistill has it",
    ),
    "group_by": (
        lambda s: s.compares_siblings and s.credit == "broadcast" and not s.is_supervised,
        "credit='broadcast' and an advantage that compares siblings",
    ),
    "rollout_return": (
        lambda s: not s.credit_mode.turns,
        f"credit={_known(CREDIT_MODES, lambda m: not m.turns)}, and the others add rewards up anyway",
    ),
    "clip_low": _CLIPS,
    "clip_high": _CLIPS,
    "baseline": (
        lambda s: not s.compares_siblings and s.credit_mode.compares and s.credit != "hierarchical",
        f"advantage={_known(ADVANTAGES, lambda one: not one.siblings and not one.selects)}, without a critic, and a "
        "credit other than 'hierarchical', which compares the invocations of an agent with each other",
    ),
    "baseline_decay": (lambda s: s.baseline != "none", "baseline"),
    "replay": (
        lambda s: not s.is_supervised and not s.credit_mode.teacher,
        "an algorithm that learns from rewards: SFT and DPO choose what is good, and a teacher gives none",
    ),
    **dict.fromkeys(("replay_size", "replay_priority"), (lambda s: s.replay > 0, "replay")),
    "routing_replay": (
        lambda s: s.minibatches * s.update_epochs > 1 and s.ranks == 1,
        "several updates per step (minibatches or update_epochs) on one rank",
    ),
    "filter_replay": (
        lambda s: (s.top_p < 1 or s.top_k > 0 or s.min_p > 0) and s.backend != "vllm" and not s.is_supervised,
        "top_p, top_k or min_p, an engine that says what they kept (vLLM does not), and an algorithm that learns from "
        "rewards",
    ),
    "kl_target": (lambda s: s.kl_coef != 0, "kl_coef, which it begins with"),
    "correction_veto": _CORRECTED,
    "reward_scale": (
        lambda s: s.advantage not in ("grpo", "maxrl") or not s.credit_mode.compares,
        "an advantage that does not divide by the rewards' scale itself, such as drgrpo, rloo or reinforce++",
    ),
    "reference_every": (
        lambda s: s.kl_coef != 0 or s.loss_spec.reference or s.hint is not None,
        "kl_coef, a loss with a reference, or agl.SelfDistill",
    ),
    "reference_share": (lambda s: s.reference_every is not None, "reference_every"),
    "kl_in": (lambda s: s.kl_coef != 0, "kl_coef"),
    "kl_estimator": (lambda s: s.kl_coef != 0 and s.kl_in == "loss", "kl_coef and kl_in='loss'"),
    "overlong_margin": (lambda s: s.overlong_tokens is not None, "overlong_tokens"),
    "correction_cap": _CORRECTED,
    "correction_floor": (lambda s: (s.correction_kind or "").endswith("mask"), "correction='mask' or 'sequence_mask'"),
}
"""Where a setting plays a part, and how to say so. One that was changed and plays none is a mistake."""


_BY_NAME = {
    "reward_weights": "{'correct': 1.0, 'short': 0.1}",
    "outcome_use": "{'timeout': 'zero'}",
    "backend_options": "{'replicas': 2}",
}
"""Settings that are mappings, with an example of each."""


def validate(settings: TrainingSettings) -> None:
    """Raises ConfigError for the first thing that is wrong."""
    if not settings.model or not isinstance(settings.model, str | PathLike):
        raise ConfigError(
            f"model is {settings.model!r}; give a directory, a Hugging Face id such as 'Qwen/Qwen3-0.6B', or 'calc', "
            "which ships with the package."
        )
    _refuse_other_types(settings)
    _refuse_unknown_choices(settings)
    _refuse_numbers_out_of_range(settings)
    _refuse_what_is_unused(settings)
    _refuse_contradictions(settings)
    _refuse_supervised_contradictions(settings)
    check_loss(settings.loss_spec)


def choices(settings: type[TrainingSettings]) -> dict[str, tuple[str, ...]]:
    """The words that each setting of a few words can be, from its type."""
    words = {name: get_args(hint) for name, hint in _types(settings).items() if get_origin(hint) is Literal}
    return {"dtype": DTYPES, **words}


@cache
def _types(settings: type[TrainingSettings]) -> dict[str, Any]:
    """The type of each setting. Resolving them takes milliseconds, so it is done once for each algorithm."""
    hints = get_type_hints(settings)
    return {f.name: hints[f.name] for f in fields(settings)}


def _refuse_other_types(s: TrainingSettings) -> None:
    for name, example in _BY_NAME.items():
        value = getattr(s, name)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} is {value!r}; it takes values by name, for example {name}={example}.")
    if not isinstance(s.rollout_config, RolloutConfig):
        raise ConfigError(
            f"rollout_config is {s.rollout_config!r}; give an object: agl.RolloutConfig(timeout_seconds=60)."
        )
    if not isinstance(s.device, str) or not re.fullmatch(r"(?!gpu)[a-z]+(:\d+)?", s.device):
        raise ConfigError(
            f"device is {s.device!r}; it can be 'auto' (a GPU where there is one), 'cpu', 'cuda', one of several: "
            "'cuda:1', or Apple's: 'mps'."
        )


def _refuse_unknown_choices(s: TrainingSettings) -> None:
    for name, allowed in choices(type(s)).items():
        value = getattr(s, name)
        if value not in allowed:
            known = " or ".join(repr(choice) for choice in allowed)
            raise ConfigError(f"{name} is {value!r}; it can be {known}.")
    _ = s.loss_spec, s.estimator, s.credit_mode, s.weigh  # each says itself what it can be
    uses = get_args(Use)
    for outcome, use in s.outcome_use.items():
        if outcome not in list(Outcome) or use not in uses:
            raise ConfigError(
                f"outcome_use has {str(outcome)!r}: {use!r}. The outcomes are {', '.join(Outcome)}; "
                f"each can be {' or '.join(repr(u) for u in uses)}."
            )
    for part, weight in s.reward_weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ConfigError(f"reward_weights has {part!r}: {weight!r}; a weight is a finite number.")
    for name in ("train_agents", "train_prompts"):
        try:
            re.compile(getattr(s, name) or "")
        except re.error as error:
            raise ConfigError(
                f"{name} is no regular expression: {error}. Escape the character or leave it out."
            ) from None


def _refuse_numbers_out_of_range(s: TrainingSettings) -> None:
    types = _types(type(s))
    for name in {**AT_LEAST, **dict.fromkeys(ABOVE_ZERO, 0)}:
        value: Any = getattr(s, name, None)
        if value is None and (name not in types or type(None) in get_args(types[name])):
            continue
        low, high = AT_LEAST.get(name), AT_MOST.get(name)
        bounds = "above 0" if low is None else f"at least {low:g}"
        bounds += "" if high is None else f" and at most {high:g}"
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        inside = number > 0 if low is None else number >= low
        if types[name] in (int, int | None) and number != int(number if math.isfinite(number) else 0):
            raise ConfigError(f"{name} is {value!r}; it must be a whole number.")
        if not inside or not math.isfinite(number) or (high is not None and number > high):
            unset = " (or None)" if any(f.name == name and f.default is None for f in fields(s)) else ""
            raise ConfigError(f"{name} is {value!r}; it must be a number {bounds}{unset}.")


def _refuse_what_is_unused(s: TrainingSettings) -> None:
    defaults = {f.name: f.default for f in fields(s)}
    for name, (is_used, where) in USED_WITH.items():
        if getattr(s, name) != defaults[name] and not is_used(s):
            raise ConfigError(
                f"{name}={getattr(s, name)!r} has no effect here: it needs {where}. Leave it out otherwise."
            )


def _refuse_contradictions(s: TrainingSettings) -> None:
    _refuse_teacherless(s)
    _refuse_advantage(s)
    if s.plays is not None and (len(s.adapters) != 1 or s.is_off_policy):
        raise ConfigError(
            "A league is for one policy whose steps wait for all rollouts: one of policies, quorum 1, no replay."
        )
    if s.plays is not None and {*s.adapters, s.frozen} & {*s.plays.members}:
        raise ConfigError("The names member-1, member-2, … are those of a league's members; call the policy otherwise.")
    if s.minibatches > s.tasks_per_step:
        raise ConfigError(
            f"minibatches ({s.minibatches}) must be at most tasks_per_step ({s.tasks_per_step}): groups stay whole."
        )
    if (s.kl_coef or s.loss_spec.reference) and any(s.adapters.values()):
        raise ConfigError(
            "Policies that go on from adapters would be compared with the base model, not with what they began as. "
            "Leave kl_coef out, or train them one by one: model='<the adapter's directory>'."
        )
    if s.reference_every is not None and s.ranks > 1:
        raise ConfigError("The reference of a learner over ranks stays: leave reference_every or ranks out.")
    if s.reference_every is not None and s.adapters:
        raise ConfigError("A reference that follows the policy is for one policy: leave policies and league out.")
    if s.checkpoint_copy is not None:
        check_url(s.checkpoint_copy)
    if s.deterministic and s.max_staleness:
        raise ConfigError("deterministic runs one thing at a time, so max_staleness must be 0 with it.")
    if s.quorum < 1 and (s.deterministic or s.dynamic_sampling):
        raise ConfigError("quorum must be 1 with deterministic and with dynamic_sampling.")
    if s.dynamic_sampling and not s.compares_siblings:
        raise ConfigError(
            "dynamic_sampling drops groups whose siblings earned the same, and this algorithm compares no siblings. "
            f"Leave it out, or choose an advantage that does: {_known(ADVANTAGES, lambda one: one.siblings)}."
        )
    if s.max_tokens is not None and (s.overlong_tokens or 0) - s.overlong_margin > s.max_tokens:
        raise ConfigError(
            f"No rollout can be overlong: it ends at max_tokens={s.max_tokens}, before overlong_tokens="
            f"{s.overlong_tokens} less the margin of {s.overlong_margin}. Lower overlong_tokens."
        )


def _refuse_advantage(s: TrainingSettings) -> None:
    """What the advantage needs and does not get, and what the loss would make of it."""
    if s.group_size < 2 and s.compares_siblings and s.group_by == "task":
        raise ConfigError(
            "group_size must be at least 2: rollouts of the same task are compared with each other. For groups of "
            f"one use a critic (PPO), group_by='rollout', or advantage="
            f"{_known(ADVANTAGES, lambda one: not one.siblings)}."
        )
    if s.compares_siblings and s.group_by == "task" and s.group_size < s.estimator.least:
        raise ConfigError(
            f"advantage={s.advantage!r} looks at {s.estimator.least} siblings at a time, and group_size is "
            f"{s.group_size}. Sample larger groups, or compare fewer."
        )
    if s.estimator.from_zero and s.credit_mode.compares and (s.overlong_tokens or (s.kl_coef and s.kl_in == "reward")):
        raise ConfigError(
            f"advantage={s.advantage!r} is for rewards of at least 0, and a penalty for length or for leaving the "
            "reference takes them below. Leave overlong_tokens out, and kl_in='reward', or take another advantage."
        )
    if s.loss_spec.whole and (s.credit_mode.turns or s.credit_mode.teacher):
        raise ConfigError(
            f"The loss {s.loss!r} has one ratio for a whole conversation, so every token of it learns the mean of "
            f"what its tokens are worth, and credit={s.credit!r} would be lost. Take another loss or 'broadcast'."
        )


def _refuse_teacherless(s: TrainingSettings) -> None:
    if not s.credit_mode.teacher:
        return
    if s.teacher is None:
        raise ConfigError("Distilling needs the model to learn from: agl.Distill(model=…, teacher=…).")
    if s.kl_coef or s.loss_spec.reference:
        raise ConfigError(
            "The teacher is what the policy is compared with, so there is no other reference beside it. Leave kl_coef "
            "out, and take a loss without a reference."
        )
    if s.teacher_url is not None and not re.match(r"https?://", s.teacher_url):
        raise ConfigError(f"teacher_url is {s.teacher_url!r}; give an address such as 'http://localhost:8000/v1'.")
    if s.teacher_url is not None and s.temperature != 1.0:
        raise ConfigError(
            f"A teacher behind an endpoint says how likely it finds tokens at temperature 1, and the policy samples at "
            f"{s.temperature}. Leave temperature out, or load the teacher here: leave teacher_url out."
        )
    if s.teacher_url is not None and s.filter_replay:
        raise ConfigError(
            "A teacher behind an endpoint says how likely it finds tokens among all, not among those that a filter "
            "kept. Leave filter_replay out, or load the teacher here: leave teacher_url out."
        )
    if s.adapters:
        raise ConfigError("A teacher is for one policy; train several policies one by one: agl.Distill(lora_rank=…).")


def _refuse_supervised_contradictions(s: TrainingSettings) -> None:
    if s.loss_spec.pairs != s.estimator.pairs:
        raise ConfigError(
            f"A loss of preferences ({_known(LOSSES, lambda one: one.pairs)}) and an advantage of pairs "
            f"({_known(ADVANTAGES, lambda one: one.pairs)}) go together: use agl.DPO(…), or another loss and advantage."
        )
    if s.is_supervised:
        if s.credit != "broadcast":
            raise ConfigError(
                f"{type(s).__name__} chooses whole rollouts to learn, so credit={s.credit!r} has nothing to share out. "
                "Leave credit out."
            )
        if s.correction not in ("auto", "none"):
            raise ConfigError(
                f"{type(s).__name__} learns what is good whoever sampled it: importance weights would unlearn it. "
                "Leave correction out."
            )
    elif s.loss_spec.on_policy and s.update_epochs > 1:
        raise ConfigError(
            f"The loss {s.loss!r} is right for the weights that sampled, so a step's rollouts can be gone through "
            "once. For more update_epochs use loss='ppo_clip'."
        )
