"""What the embedded engine refuses, and how much it can hold: requests, settings and budgets, each with its message."""

from __future__ import annotations

import logging
import math

from agentlightning.engine.base import SamplingParams
from agentlightning.errors import ConfigError, ModelError
from agentlightning.types.call import Int32Array

logger = logging.getLogger(__name__)

MAX_TOP_LOGPROBS = 100
MIN_CONTEXT = 16
MIN_PREFILL = 16


def slot_count(slot_bytes: int, budget: int, concurrency: int) -> int:
    """As many slots as the budget holds, up to two per request: one to sample in, one to keep a context for later."""
    slots = min(budget // slot_bytes, 2 * concurrency)
    if slots < 1:
        raise ConfigError(
            f"One context takes {slot_bytes / 2**20:,.0f} MiB of KV cache, more than the budget of "
            f"{budget / 2**20:,.0f} MiB. Lower max_context to the tokens of the longest conversation."
        )
    if slots < concurrency:
        logger.warning(
            "The KV cache holds %d contexts of %.0f MiB, so only %d of %d requests are sampled at the same time. "
            "Lower max_context to sample more of them at once.",
            slots, slot_bytes / 2**20, slots, concurrency,
        )  # fmt: skip
    return slots


def check_engine(max_context: int, max_concurrency: int, prefill_tokens: int) -> None:
    """Refuse sizes with which nothing could be sampled."""
    _refuse(
        {
            f"max_context must be {MIN_CONTEXT} or more, not {max_context}": max_context >= MIN_CONTEXT,
            f"max_concurrency must be 1 or more, not {max_concurrency}": max_concurrency >= 1,
            f"prefill_tokens must be {MIN_PREFILL} or more, not {prefill_tokens}": prefill_tokens >= MIN_PREFILL,
        }
    )


def check_end_ids(eos_ids: tuple[int, ...], vocab_size: int) -> None:
    """Refuse a model that could never end a response as its settings say."""
    outside = [token for token in eos_ids if not 0 <= token < vocab_size]
    if outside:
        raise ModelError(
            f"The end-of-sequence ids {outside} are outside the model's vocabulary of {vocab_size}. "
            "Correct eos_token_id in its generation_config.json."
        )


def check_params(params: SamplingParams) -> None:
    """Refuse settings that mean nothing."""
    top = params.top_logprobs
    _refuse(
        {
            f"temperature must be 0 or more and finite, not {params.temperature}": 0 <= params.temperature < math.inf,
            f"top_p must be above 0 and at most 1, not {params.top_p}": 0 < params.top_p <= 1,
            f"top_k must be 0 (off) or more, not {params.top_k}": params.top_k >= 0,
            f"max_tokens must be 1 or more, not {params.max_tokens}": params.max_tokens is None
            or params.max_tokens > 0,
            f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, not {top}": 0 <= top <= MAX_TOP_LOGPROBS,
            "stop must not hold an empty string": all(params.stop),
        }
    )


def _refuse(rules: dict[str, bool]) -> None:
    """Raise the messages of the rules that do not hold."""
    broken = [message for message, holds in rules.items() if not holds]
    if broken:
        raise ConfigError("; ".join(broken) + ".")


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
