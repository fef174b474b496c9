"""How much of which prompts the embedded engine computes in one pass. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
from transformers import PreTrainedModel

_PIECE_FLOPS = 2e10
"""About a quarter of a second of one core."""
_SCORED_LOGITS = 2**24
"""Of a pass in which a prompt is scored: 64 MiB of float32, of which there are a few copies."""


def piece_tokens(model: PreTrainedModel) -> int:
    """Prompt tokens that are computed beside decoding: a piece that takes a CPU about as long as a few steps."""
    if model.device.type != "cpu":
        return sys.maxsize
    return max(int(_PIECE_FLOPS / (2 * sum(p.numel() for p in model.parameters()))), 64)


def scored_tokens(vocab_size: int) -> int:
    """Prompt tokens after each of which logits are kept."""
    return max(16, _SCORED_LOGITS // vocab_size)


def of_like_length(work: list[tuple[int, int]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Slots and how many tokens to compute in each, from pairs of count and slot. Rows of very different lengths do not
    go into one pass: it would compute mostly padding.
    """
    left = sorted(work, reverse=True)
    while left:
        longest = left[0][0]
        batch = [(count, slot) for count, slot in left if 2 * count + 32 >= longest]
        del left[: len(batch)]
        counts, slots = np.array(batch).T
        yield slots, counts
