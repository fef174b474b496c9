"""The optimiser as clients of the Tinker API ask for it: AdamW, with the settings that each step gives."""

from __future__ import annotations

import math

from agentlightning.finetuning.tinker import bodies
from agentlightning.gateway.exchange import Refusal
from agentlightning.learner.base import OptimParams


def check_optimizer(choice: bodies.OptimizerChoice) -> None:
    """Raises `Refusal` for an optimiser that is not here."""
    if choice.type != "adamw":
        raise Refusal(f"optimizer_config.type is {choice.type!r}; this server has adamw.", param="optimizer_config")


def optim_params(body: bodies.StepRequest) -> OptimParams:
    """The settings of one step. Raises `Refusal`."""
    if body.optimizer_params is not None:
        kind = str(body.optimizer_params.get("type"))
        raise Refusal(f"optimizer_params are of {kind[:50]!r}; this server has adamw.", param="optimizer_params")
    given = body.adam_params or bodies.AdamParams()
    bounds = {
        "learning_rate": (0.0, math.inf),
        "beta1": (0.0, 1.0),
        "beta2": (0.0, 1.0),
        "eps": (0.0, math.inf),
        "weight_decay": (0.0, math.inf),
    }
    for name, (low, high) in bounds.items():
        value = getattr(given, name)
        if not low <= value < high:
            below = "" if math.isinf(high) else f" and below {high:g}"
            raise Refusal(f"adam_params.{name} is {value:g}; it is at least {low:g}{below}.", param=name)
    return OptimParams(
        learning_rate=given.learning_rate,
        beta1=given.beta1,
        beta2=given.beta2,
        eps=given.eps,
        weight_decay=given.weight_decay,
        max_grad_norm=max(given.grad_clip_norm, 0.0),
    )
