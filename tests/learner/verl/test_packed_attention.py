"""The stand-in for FlashAttention on CPUs: each row sees itself alone, and a window ends."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentlightning.learner.verl.packed_attention import attend, varlen

LENGTHS = [3, 1, 6]


def drawn(heads: int) -> Tensor:
    return torch.randn(sum(LENGTHS), heads, 8, generator=torch.Generator().manual_seed(heads))


def by_hand(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, window: int | None, scale: float) -> Tensor:
    """Token by token, with what it may see."""
    found, first = torch.zeros_like(q_THD), 0
    for length in LENGTHS:
        for at in range(first, first + length):
            seen = slice(first if window is None else max(first, at - window), at + 1)
            for head in range(q_THD.shape[1]):
                of = head * k_THD.shape[1] // q_THD.shape[1]
                weights = (k_THD[seen, of] @ q_THD[at, head] * scale).softmax(0)
                found[at, head] = weights @ v_THD[seen, of]
        first += length
    return found


@pytest.mark.parametrize("window", [None, 2])
def test_rows_are_apart_and_a_window_ends(window: int | None) -> None:
    q, k, v = drawn(4), drawn(2), drawn(2) + 1
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    how = {"causal": True, "softmax_scale": 0.3} | ({} if window is None else {"window_size": (window, window)})
    found = varlen(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=6, max_seqlen_k=6, dropout_p=0.0, **how)
    torch.testing.assert_close(found, by_hand(q, k, v, window, 0.3))


def test_what_it_does_not_compute_is_refused() -> None:
    q, k, v = drawn(2)[None], drawn(1)[None], drawn(1)[None]
    with pytest.raises(NotImplementedError):
        attend(q, k, v)
    with pytest.raises(NotImplementedError):
        attend(q, k, v, causal=True, softcap=30.0)
