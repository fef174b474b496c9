"""Attention masks of passes over slots: who may attend to what, for layers with and without a window.

Masks are explicit and added to scores. A model whose layers differ gets one by layer type, as transformers' own masks.

Shape letters: R rows of a pass, Q new tokens per row, T tokens attended to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_SIZES = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}
"""Where a configuration says how far a kind of layer reaches."""
_SHORT = 3


class Masks:
    """The masks of one model. `capacity` is the longest context."""

    def __init__(self, model: PreTrainedModel, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self._config = model.config.get_text_config()
        self._kinds = layer_kinds(model)
        self._alike = "layer_types" not in self._config.to_dict()
        # Added to the attention's scores: what eager attention needs, and spares sdpa a conversion in every layer.
        self._seen = torch.zeros((), dtype=dtype, device=device)
        self._unseen = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=device)
        self._context_T = torch.arange(capacity, device=device)

    def of(self, positions_RQ: torch.Tensor, context: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """The mask [R, 1, Q, T] for new tokens at these positions; one by layer type where there are several."""
        at_T, at_RQ1 = self._context_T[:context], positions_RQ[:, :, None]
        causal_RQT = at_T <= at_RQ1
        masks: dict[str, torch.Tensor] = {}
        for kind in self._kinds:
            visible_RQT = causal_RQT
            if kind == SLIDING:
                visible_RQT = causal_RQT & (at_T > at_RQ1 - self._size(kind))
            elif kind == CHUNKED:
                visible_RQT = causal_RQT & (at_T // self._size(kind) == at_RQ1 // self._size(kind))
            masks[kind] = torch.where(visible_RQT, self._seen, self._unseen)[:, None]
        return masks[self._kinds[0]] if self._alike or self._kinds == (FULL,) else masks

    def _size(self, kind: str) -> int:
        return getattr(self._config, _SIZES[kind])

    @contextmanager
    def short_windows(self) -> Iterator[None]:
        """Within the block windows reach back a few tokens only, so that a short sequence shows whether they hold."""
        before = {kind: self._size(kind) for kind in self._kinds if kind in _SIZES}
        for kind in before:
            setattr(self._config, _SIZES[kind], _SHORT)
        try:
            yield
        finally:
            for kind, size in before.items():
                setattr(self._config, _SIZES[kind], size)


def layer_kinds(model: PreTrainedModel) -> tuple[str, ...]:
    """The kinds of layers that a model has, as transformers calls them."""
    config = model.config.get_text_config()
    fields = config.to_dict()
    if types := fields.get("layer_types"):
        return tuple(sorted(set(types)))
    return (FULL,) if fields.get("sliding_window") is None else (SLIDING,)
