"""FlashAttention's two functions in plain PyTorch, for the rows that verl packs on CPUs, which its kernels do not know.

`register` teaches transformers an attention of the name `ATTENTION`: its own path for FlashAttention, which verl's
Ulysses stands in, with these functions at its end. Slow, and for float32 as well.

Shape letters: B batch, T tokens of all packed rows, H heads (keys and values may have fewer), D numbers of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

ATTENTION = "flash_attention_on_cpus"
"""transformers asks for the masks of FlashAttention, which are none, where the name says "flash"."""


def varlen(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    **how: Any,
) -> Tensor:
    """`flash_attn_varlen_func` of rows whose queries and keys are the same tokens: each row sees itself alone."""
    if not torch.equal(cu_seqlens_q, cu_seqlens_k):
        raise NotImplementedError("Packed rows with other keys than queries.")
    rows = [slice(*ends) for ends in pairwise(cu_seqlens_q.tolist())]
    return torch.cat([attend(q_THD[None, row], k_THD[None, row], v_THD[None, row], **how)[0] for row in rows])


def attend(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHD: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:
    """`flash_attn_func`. A window of (w, _) lets a token see itself and w before it."""
    if dropout_p or softcap or s_aux is not None or not causal:
        raise NotImplementedError("Attention that is not causal, or with dropout, a soft cap or sinks.")
    q, k, v = (part.transpose(1, 2) for part in (q_BTHD, k_BTHD, v_BTHD))
    mask = None
    if window_size[0] >= 0:
        at = torch.arange(q.shape[2], device=q.device)
        behind = at[:, None] - at
        mask = (behind >= 0) & (behind <= window_size[0])
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=softmax_scale, enable_gqa=True
    ).transpose(1, 2)


def register() -> None:
    """Idempotent. One function of transformers is replaced, because it looks for kernels in packages only."""
    from transformers import AttentionInterface, modeling_flash_attention_utils
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    AttentionInterface.register(ATTENTION, flash_attention_forward)
    AttentionMaskInterface.register(ATTENTION, flash_attention_mask)
    usual: Callable[..., Any] = modeling_flash_attention_utils._lazy_imports

    def functions(implementation: str | None, *arguments: Any, **named: Any) -> Any:
        if implementation == ATTENTION:
            return attend, varlen, None, None, None
        return usual(implementation, *arguments, **named)

    modeling_flash_attention_utils._lazy_imports = functions
