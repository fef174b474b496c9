"""The fields of OpenAI's Completions."""

from __future__ import annotations

from agentlightning.gateway.dialects.base import Fields, Unavailable
from agentlightning.gateway.dialects.tables.chat import STREAM_OPTIONS
from agentlightning.gateway.dialects.tables.common import EXTRAS_HARMLESS, EXTRAS_HONOURED, EXTRAS_UNAVAILABLE

FIELDS = Fields(
    honoured=(
        "model",
        "prompt",
        "echo",
        "n",
        "stream",
        "stream_options",
        "logprobs",
        "return_token_ids",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "max_tokens",
        "stop",
        "seed",
        "skip_special_tokens",
        *EXTRAS_HONOURED,
    ),
    harmless=("user", "continue_final_message", "add_generation_prompt", *EXTRAS_HARMLESS),
    unavailable={
        **EXTRAS_UNAVAILABLE,
        "suffix": Unavailable("a model continues a prompt and fills no gap; leave it out", neutral=("",), needed=True),
    },
)
NESTED = {"stream_options": STREAM_OPTIONS}
