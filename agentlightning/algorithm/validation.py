"""Validation of a training run's settings: numbers out of range, settings nothing uses, settings at odds.

Everything is refused when the algorithm is made, with a message that says what to do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from os import PathLike
from typing import Any, Literal, get_args, get_origin

from agentlightning.algorithm.credit.advantage import ADVANTAGES
from agentlightning.algorithm.credit.units import Use
from agentlightning.algorithm.features import FeatureSettings
from agentlightning.algorithm.records import (
    as_written,
    refuse_other_kinds,
    refuse_out_of_bounds,
    refuse_unused,
    settings_of,
    value_of,
    written,
)
from agentlightning.arguments import can_be, one_of
from agentlightning.errors import ConfigError
from agentlightning.learner.base import DTYPES
from agentlightning.learner.catalog import LOSSES, check_loss
from agentlightning.types import Outcome, RolloutConfig

LONGEST_SHOWN = 60
"""Characters of a value that is wrong; of a longer one its class is named."""
_BY_NAME = {
    "reward_weights": "{'correct': 1.0, 'short': 0.1}",
    "outcome_use": "{'timeout': 'zero'}",
    "backend_options": "{'replicas': 2}",
}
"""Settings that are mappings, with an example of each."""


def validate(settings: FeatureSettings) -> None:
    """Raises ConfigError for the first thing that is wrong, with the names of settings as they were written."""
    try:
        _validate(settings)
    except ConfigError as error:
        raise type(error)(as_written(settings, str(error))) from error.__cause__


def _validate(settings: FeatureSettings) -> None:
    if not settings.model or not isinstance(settings.model, str | PathLike):
        raise ConfigError(_no_model(settings.model))
    _refuse_other_types(settings)
    settings.check_parts()
    refuse_other_kinds(settings)
    _refuse_unknown_choices(settings)
    refuse_out_of_bounds(settings)
    refuse_unused(settings)
    settings.check()
    _refuse_contradictions(settings)
    _refuse_supervised_contradictions(settings)
    check_loss(settings.loss_spec)


def _no_model(given: Any) -> str:
    """What somebody gave who meant a model, and what to give."""
    if hasattr(given, "state_dict"):  # a module of torch, or a model of transformers
        return (
            f"model is an object of the class {type(given).__name__}; save it with its tokenizer and give the folder: "
            "model.save_pretrained('folder'), tokenizer.save_pretrained('folder'), model='folder'."
        )
    if isinstance(given, Mapping):
        return f"model is a dict; several policies begin from one: model=…, policies={dict.fromkeys(given)}."
    shown = repr(given)
    if len(shown) > LONGEST_SHOWN:
        shown = f"an object of the class {type(given).__name__}"
    return (
        f"model is {shown}; give a directory, a Hugging Face id such as 'Qwen/Qwen3-0.6B', or 'calc', which ships with "
        "the package."
    )


def choices(kind: type[Any]) -> dict[str, tuple[str, ...]]:
    """The words that each setting of a few words can be, from its type."""
    words = {n: get_args(one.type) for n, one in settings_of(kind).items() if get_origin(one.type) is Literal}
    return {"dtype": DTYPES, **words}


def _refuse_other_types(s: FeatureSettings) -> None:
    for name, example in _BY_NAME.items():
        value = getattr(s, name)
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
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


def _refuse_unknown_choices(s: FeatureSettings) -> None:
    for name, allowed in choices(type(s)).items():
        value = value_of(s, name)
        if value not in allowed:
            raise ConfigError(f"{written(s, name)} is {value!r}; {can_be(value, allowed)}")
    _ = s.loss_spec, s.estimator, s.credit_mode  # each says itself what it can be
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


def _refuse_contradictions(s: FeatureSettings) -> None:
    _refuse_advantage(s)
    if s.minibatches > s.tasks_per_step:
        raise ConfigError(
            f"minibatches ({s.minibatches}) must be at most tasks_per_step ({s.tasks_per_step}): groups stay whole. "
            f"Give minibatches={s.tasks_per_step}, or a larger tasks_per_step."
        )
    if s.deterministic and s.max_staleness:
        raise ConfigError("deterministic runs one thing at a time, so max_staleness must be 0 with it.")
    if s.quorum < 1 and (s.deterministic or s.dynamic_sampling):
        raise ConfigError("quorum must be 1 with deterministic and with dynamic_sampling.")
    if s.dynamic_sampling and not s.compares_siblings:
        raise ConfigError(
            "dynamic_sampling drops groups whose siblings earned the same, and this algorithm compares no siblings. "
            f"Leave it out, or choose an advantage that does: {one_of(ADVANTAGES, lambda one: one.siblings)}."
        )


def _refuse_advantage(s: FeatureSettings) -> None:
    """What the advantage needs and does not get, and what the loss would make of it."""
    if s.group_size < 2 and s.compares_siblings and s.group_by == "task":
        raise ConfigError(
            "group_size must be at least 2: rollouts of the same task are compared with each other. For groups of "
            f"one use agl.PPO, group_by='rollout', or advantage="
            f"{one_of(ADVANTAGES, lambda one: not one.siblings)}."
        )
    if s.compares_siblings and s.group_by == "task" and s.group_size < s.estimator.least:
        raise ConfigError(
            f"advantage={s.advantage!r} looks at {s.estimator.least} siblings at a time, and group_size is "
            f"{s.group_size}. Sample larger groups, or compare fewer."
        )
    if s.loss_spec.whole and s.credit_mode.divides:
        raise ConfigError(
            f"The loss {s.loss!r} has one ratio for a whole conversation, so every token of it learns the mean of "
            f"what its tokens are worth, and credit={s.credit!r} would be lost. Take another loss or 'broadcast'."
        )


def _refuse_supervised_contradictions(s: FeatureSettings) -> None:
    if s.loss_spec.pairs != s.estimator.pairs:
        raise ConfigError(
            f"A loss of preferences ({one_of(LOSSES, lambda one: one.pairs)}) and an advantage of pairs "
            f"({one_of(ADVANTAGES, lambda one: one.pairs)}) go together: use agl.DPO(…), or another loss and advantage."
        )
    if s.is_supervised:
        if s.credit != "broadcast":
            raise ConfigError(
                f"{type(s).__name__} chooses whole rollouts to learn, so credit={s.credit!r} has nothing to share out. "
                "Leave credit out."
            )
    elif s.loss_spec.on_policy and s.update_epochs > 1:
        raise ConfigError(
            f"The loss {s.loss!r} is right for the weights that sampled, so a step's rollouts can be gone through "
            "once. For more update_epochs use loss='ppo_clip'."
        )
