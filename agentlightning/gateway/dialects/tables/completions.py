"""The fields of OpenAI's Completions."""

from __future__ import annotations

from agentlightning.gateway.dialects.base import Fields, Unavailable
from agentlightning.gateway.dialects.tables.chat import STREAM_OPTIONS

FIELDS = Fields(
    honoured=(
        "model",
        "prompt",
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
    ),
    harmless=("user",),
    unavailable={
        "echo": Unavailable("the prompt is not repeated in the answer", neutral=(False,)),
        "best_of": Unavailable("ask for n answers and choose one", neutral=(1,)),
        "suffix": Unavailable("a model continues a prompt and fills no gap; leave it out", neutral=("",), needed=True),
    },
)
NESTED = {"stream_options": STREAM_OPTIONS}
