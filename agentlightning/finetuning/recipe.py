"""How a job trains: the values that are taken for what a client left to us, and the algorithm that follows.

"auto" is: three epochs (one of reinforcement and of preferences), a sixteenth of the lines as a batch, at most 16, and
what the algorithm would take without being told of everything else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentlightning.algorithm.grpo import GRPO
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.algorithm.supervised import DPO, SFT
from agentlightning.errors import AgentLightningError
from agentlightning.finetuning.requests import Method

KEPT = 3
"""Checkpoints of a job that are kept, the last ones; and the best one, where there is a validation reward."""
_EPOCHS: Mapping[str, int] = {"supervised": 3, "dpo": 1, "reinforcement": 1}
_SHARE, _LARGEST_BATCH = 16, 16


@dataclass(frozen=True)
class BaseModel:
    """A model that jobs may start from."""

    name: str
    """What clients call it."""
    model: str
    """A directory, a checkpoint, a Hugging Face id, or the name of a model that ships with the package."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of training that its owner gives, such as `lora_rank` or `device`."""
    stable_reinforce: str | None = None
    """The loss that is computed where a client of `tinker` asks for this one, which is not published; None: none is."""


def take(method: Method, lines: int, base: BaseModel) -> dict[str, Any]:
    """The value of each hyperparameter, for a training file of so many lines. Raises ConfigError or ModelError."""
    given = method.hyperparameters
    batch = given.value("batch_size") or min(max(lines // _SHARE, 1), _LARGEST_BATCH)
    taken: dict[str, Any] = {
        "n_epochs": given.value("n_epochs") or _EPOCHS[method.type],
        "batch_size": min(batch, lines),
        "learning_rate_multiplier": given.value("learning_rate_multiplier") or 1.0,
    }
    if method.type == "dpo":
        taken["beta"] = given.value("beta") or DPO.dpo_beta
    if method.type == "reinforcement":
        taken["compute_multiplier"] = given.value("compute_multiplier") or 1.0
        taken["eval_interval"] = given.value("eval_interval") or GRPO.validation.every
        taken["eval_samples"] = given.value("eval_samples") or GRPO.validation.repeats
        taken["reasoning_effort"] = "default"
    algorithm(method.type, taken, lines, base, seed=0)
    return taken


def check(base: BaseModel) -> None:
    """Raises ConfigError or ModelError for a model that is nowhere, and for settings that training does not have."""
    try:
        take(Method(type="supervised"), 1, base)
    except AgentLightningError as error:
        raise type(error)(f"The base model '{base.name}' cannot be trained. {error}") from None


def algorithm(kind: str, taken: Mapping[str, Any], lines: int, base: BaseModel, *, seed: int) -> TrainingSettings:
    """What trains a job with these values. Raises ConfigError or ModelError."""
    batch, epochs = taken["batch_size"], taken["n_epochs"]
    common: dict[str, Any] = {
        "model": base.model,
        "epochs": epochs,
        "tasks_per_step": batch,
        "seed": seed,
        "keep_checkpoints": KEPT,
        "save_every": min(math.ceil(lines / batch), TrainingSettings.checkpoints.every),
    }
    made = _MAKERS[kind](taken, {**common, **base.settings})
    return replace(made, learning_rate=made.peak_rate * taken["learning_rate_multiplier"])


_MAKERS: Mapping[str, Any] = {
    "supervised": lambda taken, given: SFT(source="chats", **given),
    "dpo": lambda taken, given: DPO(source="pairs", dpo_beta=taken["beta"], **given),
    "reinforcement": lambda taken, given: GRPO(
        group_size=max(2, round(GRPO.group_size * taken["compute_multiplier"])),
        val_every=taken["eval_interval"],
        val_repeats=taken["eval_samples"],
        **given,
    ),
}
