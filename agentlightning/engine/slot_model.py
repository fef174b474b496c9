"""Passes of a Hugging Face model over slots of the KV cache: prompts in batches, then one token for every slot in use.

The forward is the model's own, so whatever is in its layers (LoRA, …) counts. Masks and positions are explicit.

Shape letters: R rows of a pass, Q new tokens per row, T tokens attended to, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from agentlightning.engine.kv_cache import KVShape, SlotCache, unsupported
from agentlightning.errors import ModelError

_GAP_FLOAT32 = 1e-3
_GAP_HALF = 0.05
_CHECK_TOKENS = 8


class SlotModel:
    """A model with a cache of `slots` contexts of `max_context` tokens."""

    def __init__(self, model: PreTrainedModel, shape: KVShape, slots: int, max_context: int) -> None:
        self.model: Any = model
        # One position more than a context: padding writes there, and nothing attends to it.
        self.capacity = max_context + 1
        self.cache = SlotCache(shape, slots, self.capacity)
        self._slots = slots
        self._device = shape.device
        # Added to the attention's scores: what eager attention needs, and spares sdpa a conversion in every layer.
        self._seen = torch.zeros((), dtype=shape.dtype, device=shape.device)
        self._unseen = torch.full((), torch.finfo(shape.dtype).min, dtype=shape.dtype, device=shape.device)
        self._context_T = torch.arange(self.capacity, device=shape.device)

    def prefill(self, tokens: list[np.ndarray], slots: np.ndarray, starts: np.ndarray) -> torch.Tensor:
        """Compute `tokens[r]` in slot `slots[r]` from position `starts[r]` on; logits after the last token, [R, V]."""
        rows = len(tokens)
        counts = np.array([len(t) for t in tokens])
        query = int(counts.max())
        # Rows end together, so that the last column is everyone's last token; what is missing at the front is padding.
        ids = np.zeros((rows, query), dtype=np.int64)
        for row, row_tokens in enumerate(tokens):
            ids[row, query - len(row_tokens) :] = row_tokens
        positions = np.arange(query) + (starts + counts - query)[:, None]
        padding = np.arange(query) < (query - counts)[:, None]
        write = np.where(padding, self.capacity - 1, positions) + slots[:, None] * self.capacity
        positions[padding] = 0
        context = int((starts + counts).max())
        index = torch.from_numpy(slots).to(self._device)
        return self._forward(ids, positions, index, write, context)

    def decode(self, ids: np.ndarray, positions: np.ndarray, context: int) -> torch.Tensor:
        """Compute one token in each of the first R slots, ids and positions [R]; logits after it, [R, V]."""
        rows = len(ids)
        write = positions + np.arange(rows) * self.capacity
        return self._forward(ids.astype(np.int64)[:, None], positions[:, None], slice(0, rows), write, context)

    def _forward(
        self, ids_RQ: np.ndarray, positions_RQ: np.ndarray, rows: slice | torch.Tensor, write: np.ndarray, context: int
    ) -> torch.Tensor:
        positions = torch.from_numpy(positions_RQ).to(self._device)
        mask_RQT = torch.where(self._context_T[:context] <= positions[:, :, None], self._seen, self._unseen)
        flat = torch.from_numpy(write.reshape(-1)).to(self._device)
        self.cache.plan(rows, flat, context, ids_RQ.shape[1])
        return self.model(
            input_ids=torch.from_numpy(ids_RQ).to(self._device),
            attention_mask=mask_RQT[:, None],
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    @torch.inference_mode()
    def self_check(self) -> int:
        """Compare passes over slots with a plain forward of a few tokens; returns the size of the vocabulary.

        Models that ignore the positions or the mask they are given would sample nonsense without any other sign.
        """
        try:
            gap, logits = self._compare()
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise unsupported(f"its forward fails when it is given masks and positions ({error})") from error
        allowed = _GAP_FLOAT32 if logits.dtype in (torch.float32, torch.float64) else _GAP_HALF
        if math.isnan(gap):
            raise ModelError(
                "The model's log-probs are not finite (NaN): its weights are broken. Load another checkpoint."
            )
        if gap > allowed:
            raise unsupported(
                f"with its context in slots, its log-probs differ by {gap:.2g} from a plain forward ({allowed:.2g} "
                "allowed), so it does not follow the positions and masks that it is given"
            )
        return logits.shape[-1]

    def _compare(self) -> tuple[float, torch.Tensor]:
        """Two sequences prefilled alone, then together, then decoded: the largest gap, and the last logits."""
        rows = min(2, self._slots)
        ids = np.random.default_rng(0).integers(0, self.model.get_input_embeddings().num_embeddings, _CHECK_TOKENS)
        for row in range(rows):  # alone, so that the rows' positions are not merely shifted by padding
            self.prefill([ids[: 4 - 2 * row]], np.array([row]), np.array([0]))
        counts = [5, 4][:rows]
        logits = self.prefill([ids[4:5], ids[2:4]][:rows], np.arange(rows), np.array([4, 2][:rows]))
        gaps = [self._gap(logits[row], ids[:n]) for row, n in enumerate(counts)]
        while max(counts) < len(ids):
            logits = self.decode(ids[counts], np.array(counts), max(counts) + 1)
            counts = [n + 1 for n in counts]
            gaps += [self._gap(logits[row], ids[:n]) for row, n in enumerate(counts)]
        return float(np.max(gaps)), logits  # NaN if one of them is

    def _gap(self, logits_V: torch.Tensor, sequence: np.ndarray) -> float:
        """Mean difference of the log-probs from those of a plain forward, weighted by probability."""
        ids = torch.from_numpy(sequence)[None].to(self._device)
        plain_V = self.model(input_ids=ids, use_cache=False).logits[0, -1].float().log_softmax(-1)
        return float((plain_V.exp() * (logits_V.float().log_softmax(-1) - plain_V).abs()).sum())
