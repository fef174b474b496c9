"""Sizes that people speak of by their number alone, as the configurations of widely used open models have them."""

from __future__ import annotations

import re
from pathlib import Path

from agentlightning.errors import ModelError
from agentlightning.models.shape import ModelShape, read_shape, shape_of


def _decoder(hidden: int, layers: int, heads: int, keys: int, inner: int, *, tied: bool, **more: int) -> ModelShape:
    return shape_of(
        {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": keys,
            "head_dim": 128,
            "intermediate_size": inner,
            "vocab_size": 151_936,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 40_960,
            **more,
        }
    )


SIZES = {
    "135m": _decoder(576, 30, 9, 3, 1536, tied=True, head_dim=64, vocab_size=49_152, max_position_embeddings=8192),
    "0.6b": _decoder(1024, 28, 16, 8, 3072, tied=True),
    "1.7b": _decoder(2048, 28, 16, 8, 6144, tied=True),
    "4b": _decoder(2560, 36, 32, 8, 9728, tied=True),
    "8b": _decoder(4096, 36, 32, 8, 12_288, tied=False),
    "14b": _decoder(5120, 40, 40, 8, 17_408, tied=False),
    "30b-a3b": _decoder(
        2048, 48, 32, 4, 6144, tied=False, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8
    ),
    "32b": _decoder(5120, 64, 64, 8, 25_600, tied=False),
    "70b": _decoder(8192, 80, 64, 8, 28_672, tied=False, vocab_size=128_256, max_position_embeddings=131_072),
}
"""Qwen3's, but for 135m (SmolLM2) and 70b (Llama 3)."""

TRIED = {"HuggingFaceTB/SmolLM2-135M-Instruct": ("135m", "agl demo sentiment trains an adapter on it")}
"""Hugging Face ids whose weights were trained here: their size, and by what."""


def is_size(model: str) -> bool:
    """Whether this is a size, and no folder of that name."""
    return model.lower() in SIZES and not Path(model).exists()


def known_shape(model: str) -> ModelShape:
    """Of a size such as `8B`, a shipped model, a directory or a Hugging Face id.

    Raises ModelError for what is none of these, or has no configuration that can be understood.
    """
    if is_size(model):
        return SIZES[model.lower()]
    if re.fullmatch(r"\d+(\.\d+)?[bm]", model.lower()) and not Path(model).exists():
        raise ModelError(f"There is no size {model!r} here. Give the next larger one: {', '.join(SIZES)}.")
    shape = read_shape(model)
    if shape is None:
        raise ModelError(
            f"The configuration of '{model}' does not say its sizes. Give a size instead: {', '.join(SIZES)}."
        )
    return shape
