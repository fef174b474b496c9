"""An adapter as verl's workers make one: of the policy's shape. Its weights are the policy's, which they are given.

verl draws an adapter's weights itself, or reads a folder that every machine must have; neither is needed here.
"""

from __future__ import annotations

from typing import Any

from agentlightning.errors import ConfigError
from agentlightning.learner.policy import Policy

ANY = {"auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core", "peft_version", "revision"}
"""What of an adapter's configuration says nothing of what is computed."""
DROPPED = {"lora_dropout"}
"""Nothing is dropped out in training, here or there."""


def adapter_of(policy: Policy) -> dict[str, Any]:
    """What verl's model configuration says of the policy's adapter; empty where all weights are trained. Raises
    ConfigError for an adapter that it has no words for."""
    if policy.peft is None:
        return {}
    from peft import LoraConfig

    config = policy.peft.peft_config["default"]
    modules = config.target_modules
    named = modules if isinstance(modules, str) else sorted(modules)
    plain = LoraConfig(r=config.r, lora_alpha=config.lora_alpha, target_modules=modules, task_type=config.task_type)
    usual = plain.to_dict()
    other = {n: v for n, v in config.to_dict().items() if v != usual.get(n) and n not in ANY | DROPPED}
    if other:
        words = ", ".join(f"{name}={value!r}" for name, value in sorted(other.items()))
        raise ConfigError(
            f"verl's workers make plain LoRA adapters, and that in {policy.path} is one with {words}. "
            "Start from a new adapter (lora_rank), or take learner='own'."
        )
    return {"lora_rank": config.r, "lora_alpha": config.lora_alpha, "target_modules": named}
