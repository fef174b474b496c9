"""Passes of a Hugging Face model over slots of the KV cache: prompts in batches, then one token for every slot in use.

The forward is the model's own, so whatever is in its layers (LoRA, …) counts. Positions are explicit, and so are the
masks, which are added to scores: who may attend to what, in layers with and without a window. A model whose layers
differ gets one mask by layer type, as transformers' own masks.

Shape letters: R rows of a pass, Q new tokens per row, T tokens attended to, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from agentlightning.engine.graphs import DecodeGraphs
from agentlightning.engine.kv_cache import DoesNotFit, KVShape, SlotCache
from agentlightning.errors import ModelError

_GAP_FLOAT32 = 1e-3
_GAP_HALF = 0.05
_CHECK_TOKENS = 8


class SlotModel:
    """A model with a cache of `slots` contexts of `max_context` tokens."""

    def __init__(
        self, model: PreTrainedModel, shape: KVShape, slots: int, max_context: int, *, block: int | None = None
    ) -> None:
        """`block`: tokens of a block of memory; None: a slot keeps what it took."""
        self.model: Any = model
        self.capacity = capacity_of(max_context, block)
        self.cache = SlotCache(shape, slots, self.capacity, paged=block is not None)
        # Padding writes there, and nothing attends to it: the last position of a slot is none of a context's.
        self._nowhere = slots * self.capacity - 1
        self._slots = slots
        self._device = shape.device
        self._masks = _Masks(model, self.capacity, shape.dtype, shape.device)
        self.graphs: DecodeGraphs | None = None

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
        write = np.where(padding, self._nowhere, positions + slots[:, None] * self.capacity)
        positions[padding] = 0
        context = int((starts + counts).max())
        index = torch.from_numpy(slots).to(self._device)
        return self._forward(ids, positions, index, write, context)[:, -1]

    def score(self, tokens: np.ndarray, slot: int, start: int) -> torch.Tensor:
        """Compute `tokens` in a slot from position `start` on; logits after each of them, [Q, V]."""
        positions = start + np.arange(len(tokens))[None]
        index = torch.tensor([slot], device=self._device)
        context = start + len(tokens)
        write = positions + slot * self.capacity
        return self._forward(tokens[None].astype(np.int64), positions, index, write, context, keep=len(tokens))[0]

    def decode(self, ids: np.ndarray, positions: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        """Compute one token in each of the first slots, ids and positions [slots]; logits after it in `rows`, [R, V].

        What lies between these rows is computed along, and nothing of it kept.
        """
        span = len(ids)
        write = positions + np.arange(span) * self.capacity
        if len(rows) != span:
            between = np.ones(span, dtype=np.bool_)
            between[rows] = False
            write[between] = self._nowhere
        context = int(positions[rows].max()) + 1
        if self.graphs is not None and self.graphs.works:
            logits = self.graphs.decode(ids, positions, write, context)
        else:
            given = (ids.astype(np.int64)[:, None], positions[:, None])
            logits = self._forward(*given, slice(0, span), write, context)[:, -1]
        return logits if len(rows) == span else logits[torch.from_numpy(rows).to(logits.device)]

    def _forward(
        self,
        ids_RQ: np.ndarray,
        positions_RQ: np.ndarray,
        rows: slice | torch.Tensor,
        write: np.ndarray,
        context: int,
        keep: int = 1,
    ) -> torch.Tensor:
        """Logits after the last `keep` tokens of each row, [R, keep, V]."""
        given = (ids_RQ, positions_RQ, write.reshape(-1))
        ids, positions, flat = (torch.from_numpy(array).to(self._device) for array in given)
        return self._computed(ids, positions, rows, flat, context, keep)

    def _decoded(
        self, ids_R1: torch.Tensor, positions_R1: torch.Tensor, write_R: torch.Tensor, context: int
    ) -> torch.Tensor:
        """Logits after one token in each of the first R slots, [R, V]."""
        return self._computed(ids_R1, positions_R1, slice(0, len(ids_R1)), write_R, context)[:, -1]

    def _computed(
        self,
        ids_RQ: torch.Tensor,
        positions_RQ: torch.Tensor,
        rows: slice | torch.Tensor,
        write: torch.Tensor,
        context: int,
        keep: int = 1,
    ) -> torch.Tensor:
        self.cache.plan(rows, write, context, ids_RQ.shape[1])
        return self.model(
            input_ids=ids_RQ,
            attention_mask=self._masks.of(positions_RQ, context),
            position_ids=positions_RQ,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits[:, -keep:]

    def record_graphs(self) -> None:
        """Record decoding passes from now on, as a GPU of CUDA's can. For a model that computes every row alike."""
        self.graphs = DecodeGraphs(
            self.model,
            self._decoded,
            slots=self._slots,
            capacity=self.capacity,
            nowhere=self._nowhere,
            device=self._device,
        )

    @torch.inference_mode()
    def self_check(self) -> int:
        """Compare passes over slots with a plain forward of a few tokens; returns the size of the vocabulary.

        Raises `DoesNotFit` for models that ignore the positions or masks they are given: they would sample nonsense
        without any other sign.
        """
        try:
            with self._masks.short_windows():
                gap, logits = self._compare()
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            raise DoesNotFit(f"its forward fails when it is given masks and positions ({error})") from error
        check_gap(gap, logits)
        return logits.shape[-1]

    def _compare(self) -> tuple[float, torch.Tensor]:
        """Two sequences prefilled alone, then together, then decoded: the largest gap, and the last logits."""
        rows = min(2, self._slots)
        ids = np.random.default_rng(0).integers(0, self.model.get_input_embeddings().num_embeddings, _CHECK_TOKENS)
        for row in range(rows):  # alone, so that the rows' positions are not merely shifted by padding
            self.prefill([ids[: 4 - 2 * row]], np.array([row]), np.array([0]))
        counts = [5, 4][:rows]
        logits = self.prefill([ids[4:5], ids[2:4]][:rows], np.arange(rows), np.array([4, 2][:rows]))
        gaps = [gap_to_plain(self.model, logits[row], ids[:n]) for row, n in enumerate(counts)]
        while max(counts) < len(ids):
            logits = self.decode(ids[counts], np.array(counts), np.arange(rows))
            counts = [n + 1 for n in counts]
            gaps += [gap_to_plain(self.model, logits[row], ids[:n]) for row, n in enumerate(counts)]
        return float(np.max(gaps)), logits  # NaN if one of them is


def capacity_of(max_context: int, block: int | None) -> int:
    """Positions of a slot: one more than a context has, and whole blocks."""
    return max_context + 1 if block is None else -(-(max_context + 1) // block) * block


def gap_to_plain(model: Any, logits_V: torch.Tensor, sequence: np.ndarray) -> float:
    """Mean difference of the log-probs from those of a plain forward of the sequence, weighted by probability."""
    ids = torch.from_numpy(sequence)[None].to(logits_V.device)
    plain_V = model(input_ids=ids, use_cache=False).logits[0, -1].float().log_softmax(-1)
    return float((plain_V.exp() * (logits_V.float().log_softmax(-1) - plain_V).abs()).sum())


def check_gap(gap: float, logits: torch.Tensor, allowed: float = _GAP_FLOAT32) -> None:
    """Raises `DoesNotFit` for a gap that is more than rounding, `ModelError` for weights that are broken."""
    allowed = allowed if logits.dtype in (torch.float32, torch.float64) else _GAP_HALF
    if math.isnan(gap):
        raise ModelError("The model's log-probs are not finite (NaN): its weights are broken. Load another checkpoint.")
    if gap > allowed:
        raise DoesNotFit(
            f"its log-probs over a cache differ by {gap:.2g} from those of a plain forward ({allowed:.2g} allowed)"
        )


_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_SIZES = {_SLIDING: "sliding_window", _CHUNKED: "attention_chunk_size"}
"""Where a configuration says how far a kind of layer reaches."""
_SHORT = 3


class _Masks:
    """The masks of one model. `capacity` is the longest context."""

    def __init__(self, model: PreTrainedModel, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self._config = model.config.get_text_config()
        self._kinds = _layer_kinds(model)
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
            if kind == _SLIDING:
                visible_RQT = causal_RQT & (at_T > at_RQ1 - self._size(kind))
            elif kind == _CHUNKED:
                visible_RQT = causal_RQT & (at_T // self._size(kind) == at_RQ1 // self._size(kind))
            masks[kind] = torch.where(visible_RQT, self._seen, self._unseen)[:, None]
        return masks[self._kinds[0]] if self._alike or self._kinds == (_FULL,) else masks

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


def _layer_kinds(model: PreTrainedModel) -> tuple[str, ...]:
    """The kinds of layers that a model has, as transformers calls them."""
    config = model.config.get_text_config()
    fields = config.to_dict()
    if types := fields.get("layer_types"):
        return tuple(sorted(set(types)))
    return (_FULL,) if fields.get("sliding_window") is None else (_SLIDING,)
