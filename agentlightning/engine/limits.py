"""What the embedded engine refuses, and how much it can hold: requests, settings and budgets, each with its message."""

from __future__ import annotations

import logging

from agentlightning.engine.base import SamplingParams
from agentlightning.errors import ConfigError, ModelError
from agentlightning.types.call import Int32Array

logger = logging.getLogger(__name__)

MAX_TOP_LOGPROBS = 100


def slot_count(slot_bytes: int, budget: int, concurrency: int) -> int:
    """As many slots as the budget holds, up to two per request: one to sample in, one to keep a context for later."""
    slots = min(budget // slot_bytes, 2 * concurrency)
    if slots < 1:
        raise ConfigError(
            f"One context takes {slot_bytes / 2**20:,.0f} MiB of KV cache, more than the budget of "
            f"{budget / 2**20:,.0f} MiB. Raise kv_budget_bytes or lower max_context."
        )
    if slots < concurrency:
        logger.warning(
            "The KV cache holds %d contexts of %.0f MiB, so only %d of %d requests are sampled at the same time. "
            "Raise kv_budget_bytes or lower max_context for more.",
            slots, slot_bytes / 2**20, slots, concurrency,
        )  # fmt: skip
    return slots


def check_params(params: SamplingParams) -> None:
    """Refuse settings that mean nothing."""
    checks = {
        f"temperature must be 0 or more and finite, not {params.temperature}": 0 <= params.temperature < float("inf"),
        f"top_p must be above 0 and at most 1, not {params.top_p}": 0 < params.top_p <= 1,
        f"top_k must be 0 (off) or more, not {params.top_k}": params.top_k >= 0,
        f"max_tokens must be 1 or more, not {params.max_tokens}": params.max_tokens is None or params.max_tokens >= 1,
        f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, not {params.top_logprobs}": (
            0 <= params.top_logprobs <= MAX_TOP_LOGPROBS
        ),
        "stop must not hold an empty string": all(params.stop),
    }
    wrong = [message for message, right in checks.items() if not right]
    if wrong:
        raise ConfigError("; ".join(wrong) + ".")


def check_prompt(prompt_ids: Int32Array, max_context: int, vocab_size: int) -> None:
    """Refuse prompts that cannot be sampled from."""
    if not len(prompt_ids):
        raise ModelError("The prompt is empty; give at least one token.")
    if len(prompt_ids) >= max_context:
        raise ModelError(
            f"The prompt has {len(prompt_ids)} tokens, but the context ends at {max_context} (prompt and response). "
            "Shorten the prompt, or raise max_context if the model allows it."
        )
    low, high = int(prompt_ids.min()), int(prompt_ids.max())
    if low < 0 or high >= vocab_size:
        raise ModelError(
            f"The prompt holds token id {low if low < 0 else high}, outside the model's vocabulary of {vocab_size}. "
            "Was it made with another model's tokenizer?"
        )
