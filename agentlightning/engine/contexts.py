"""How an engine keeps the contexts of a model, so that any decoder of transformers can be sampled from.

Contexts are kept in slots of the KV cache where they fit (`SlotModel`). Models that keep more than keys and values
(recurrent states, compressed or shared keys) have one cache of their own class per context: only the model knows what
is in it, so no part of a context can be cut off or joined with another; it is continued where it ends, or copied whole,
and requests are computed one after the other, which is exact and slow. Where not even the model's own cache gives the
numbers of its plain forward, a context is its tokens, and each pass computes all of them again.
"""

from __future__ import annotations

import copy
import inspect
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from agentlightning.engine.block_pool import BlockBudget
from agentlightning.engine.kv_cache import DoesNotFit, KVShape, probe
from agentlightning.engine.limits import slot_count
from agentlightning.engine.slot_model import SlotModel, check_gap, gap_to_plain
from agentlightning.errors import ModelError
from agentlightning.models.hardware import cache_bytes

logger = logging.getLogger(__name__)

_CHECK_TOKENS = 24
_STEPS = 6
"""Of a model's own cache: tokens that it is checked with, the last of them one by one."""
_GAP_FLOAT32 = 1e-5
"""Largest mean difference of log-probs: some families compute steps over a cache by another formula."""


@dataclass(frozen=True, slots=True)
class Contexts:
    """The passes of a model over `slots` contexts, after a comparison with plain forwards."""

    model: SlotModel | _OwnCacheModel
    slots: int
    vocab_size: int
    why_own: str = ""
    """Why contexts are not in slots of the KV cache; empty if they are."""
    budget: BlockBudget | None = None
    """Of memory, in blocks that follow the tokens in use; None where all slots together stay within the limit."""

    @property
    def kind(self) -> str:
        """ "slots", "own cache" or "recomputed"."""
        return {SlotModel: "slots", _OwnCacheModel: "own cache", RecomputedModel: "recomputed"}[type(self.model)]

    @property
    def cuts(self) -> bool:
        """Whether a part of a context can be used again."""
        return isinstance(self.model, SlotModel)

    @property
    def continues(self) -> bool:
        """Whether a prompt can be computed in pieces."""
        return isinstance(self.model, SlotModel) or self.model.continues


def cache_budget(device: torch.device, reserved: int = 0) -> int:
    """`cache_bytes` of this device, which has the model already and will have so many bytes more to learn."""
    return cache_bytes(torch.cuda.mem_get_info(device)[0] - reserved if device.type == "cuda" else None)


def make_contexts(model: PreTrainedModel, max_context: int, budget: int, concurrency: int) -> Contexts:
    """Room for as many contexts as `budget` bytes hold, up to two per request.

    Raises `ModelError` for a model that cannot be sampled from exactly, `ConfigError` for a budget too small.
    """
    if model.config.is_encoder_decoder:
        raise ModelError("The embedded engine samples from decoders, and this model is an encoder-decoder.")
    try:
        return _in_slots(model, max_context, budget, concurrency)
    except DoesNotFit as error:
        why_own = str(error)
    name = type(model).__name__
    try:
        contexts = _one_by_one(_OwnCacheModel, model, max_context, budget, concurrency, why_own)
        logger.warning("%s samples one request after the other, in caches of its own class: %s.", name, why_own)
    except DoesNotFit as error:
        why_own = f"{why_own}; {error}"
        contexts = _one_by_one(RecomputedModel, model, max_context, budget, concurrency, why_own)
        logger.warning("%s computes the whole context again for every token: %s.", name, why_own)
    return contexts


def _in_slots(model: PreTrainedModel, max_context: int, budget: int, concurrency: int) -> Contexts:
    try:
        shape = probe(model)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise DoesNotFit(f"its forward fails with transformers' own cache ({error})") from error
    if (paged := _in_blocks(model, shape, max_context, budget, concurrency)) is not None:
        return paged
    slots = slot_count(shape.bytes_per_token * (max_context + 1), budget, concurrency)
    passes = SlotModel(model, shape, slots, max_context)
    return Contexts(passes, slots, passes.self_check())


def _in_blocks(
    model: PreTrainedModel, shape: KVShape, max_context: int, budget: int, concurrency: int
) -> Contexts | None:
    """Two slots per request, whose memory follows their tokens; None where memory cannot, or need not."""
    slots, block = 2 * concurrency, shape.block
    if block is None or budget >= slots * shape.bytes_per_token * (max_context + 1):
        return None
    blocks = budget // (shape.bytes_per_token * block)
    if blocks * block < max_context + 1:
        return None
    try:
        passes = SlotModel(model, shape, slots, max_context, block=block)
    except (OSError, OverflowError):  # so many addresses are not to be had
        return None
    vocab_size = passes.self_check()
    for slot in (0, 1, slots - 1):  # what the check wrote
        passes.cache.clear(slot)
    return Contexts(passes, slots, vocab_size, budget=BlockBudget(blocks, block))


def _one_by_one(
    kind: type[_OwnCacheModel], model: PreTrainedModel, max_context: int, budget: int, concurrency: int, why: str
) -> Contexts:
    trial = kind(model, 1, max_context)
    vocab_size = trial.self_check()
    slots = slot_count(trial.bytes_per_context(max_context), budget, concurrency)
    passes = kind(model, slots, max_context)
    passes.continues = trial.continues
    return Contexts(passes, slots, vocab_size, why)


class _OwnCaches:
    """A cache of the model's own class for each slot, with the verbs of `SlotCache`."""

    def __init__(self, slots: int) -> None:
        self.slots: list[Any] = [None] * slots

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy a slot, which holds exactly so many tokens."""
        self.slots[target] = copy.deepcopy(self.slots[source])

    def swap(self, a: int, b: int, tokens_a: int, tokens_b: int) -> None:
        self.slots[a], self.slots[b] = self.slots[b], self.slots[a]

    def clear(self, slot: int) -> None:
        self.slots[slot] = None


class _OwnCacheModel:
    """The passes of `SlotModel`, over caches of the model's own class.

    `continues` is whether the model computes several tokens after a context that is there; otherwise every prompt is
    computed whole, in one piece.
    """

    def __init__(self, model: PreTrainedModel, slots: int, max_context: int) -> None:
        self.model: Any = model
        self.capacity = max_context + 1
        self.cache = _OwnCaches(slots)
        self.continues = True
        self._fields = _fields(model)

    def prefill(self, tokens: list[np.ndarray], slots: np.ndarray, starts: np.ndarray) -> torch.Tensor:
        """Compute `tokens[r]` in slot `slots[r]`, which holds `starts[r]` tokens; logits after the last, [R, V]."""
        rows = zip(tokens, slots.tolist(), starts.tolist(), strict=True)
        return torch.cat([self._pass(ids, slot, anew=start == 0)[:, -1] for ids, slot, start in rows])

    def score(self, tokens: np.ndarray, slot: int, start: int) -> torch.Tensor:
        """Compute `tokens` in a slot, which holds `start` tokens; logits after each of them, [Q, V]."""
        return self._pass(tokens, slot, anew=start == 0, keep=len(tokens))[0]

    def decode(self, ids: np.ndarray, positions: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        """Compute one token in each slot of `rows`, `ids` by slot; logits after it, [R, V]."""
        slots = rows.tolist()
        return torch.cat([self._pass(ids[s : s + 1], s, anew=positions[s] == 0)[:, -1] for s in slots])

    def _pass(self, ids: np.ndarray, slot: int, *, anew: bool, keep: int = 1) -> torch.Tensor:
        """Logits after the last `keep` tokens, [1, keep, V]."""
        if anew:
            self.cache.slots[slot] = DynamicCache(config=self.model.config)
        given = torch.from_numpy(ids.astype(np.int64))[None].to(self.model.device)
        fields = self._fields(self.cache.slots[slot], keep)
        return self.model(input_ids=given, use_cache=True, **fields).logits[:, -keep:]

    @torch.inference_mode()
    def self_check(self) -> int:
        """Compare with plain forwards; returns the size of the vocabulary. Raises `DoesNotFit` if it is not exact."""
        try:
            gap, logits = self._compare(10)
            if not gap <= _GAP_FLOAT32:
                self.continues = False
                gap, logits = self._compare(_CHECK_TOKENS - _STEPS)
        except Exception as error:  # a model's own code, which knows other caches or none
            raise DoesNotFit(f"its forward fails with a cache ({type(error).__name__}: {error})") from error
        check_gap(gap, logits, _GAP_FLOAT32)
        self.cache.clear(0)
        return logits.shape[-1]

    def _compare(self, first: int) -> tuple[float, torch.Tensor]:
        """One sequence: `first` tokens, then more, then a few one by one. The largest gap, and the last logits."""
        ids = np.random.default_rng(0).integers(0, self.model.get_input_embeddings().num_embeddings, _CHECK_TOKENS)
        cuts = sorted({first, *range(_CHECK_TOKENS - _STEPS, _CHECK_TOKENS + 1)})
        gaps: list[float] = []
        logits = torch.empty(0)
        for low, high in zip([0, *cuts], cuts, strict=False):
            logits = self.prefill([ids[low:high]], np.array([0]), np.array([low]))
            gaps.append(gap_to_plain(self.model, logits[0], ids[:high]))
        return float(np.max(gaps)), logits

    @torch.inference_mode()
    def bytes_per_context(self, tokens: int) -> int:
        """Memory of one context of so many tokens, judged by two short ones."""
        sizes: list[int] = []
        for count in (1, 9):
            self.prefill([np.zeros(count, dtype=np.int64)], np.array([0]), np.array([0]))
            sizes.append(_bytes(self.cache.slots[0]))
        self.cache.clear(0)
        return sizes[0] + (sizes[1] - sizes[0]) * tokens // 8


class RecomputedModel(_OwnCacheModel):
    """No cache at all: every pass computes a whole context with the plain forward. Exact by construction."""

    def _pass(self, ids: np.ndarray, slot: int, *, anew: bool, keep: int = 1) -> torch.Tensor:
        known = ids.copy() if anew else np.concatenate([self.cache.slots[slot], ids])
        self.cache.slots[slot] = known
        given = torch.from_numpy(known.astype(np.int64))[None].to(self.model.device)
        return self.model(input_ids=given, use_cache=False).logits[:, -keep:]


def _fields(model: PreTrainedModel) -> Any:
    """How the model's forward takes a cache, as a function of the cache and of how many logits are wanted."""
    known = inspect.signature(model.forward).parameters
    name = next((name for name in ("past_key_values", "cache_params") if name in known), "past_key_values")
    keeps = "logits_to_keep" in known
    return lambda cache, keep: {name: cache, **({"logits_to_keep": keep} if keeps else {})}


def _bytes(thing: Any) -> int:
    """All arrays that a context holds."""
    if isinstance(thing, torch.Tensor | np.ndarray):
        return thing.nbytes
    if isinstance(thing, dict):
        return sum(map(_bytes, thing.values()))
    if isinstance(thing, list | tuple):
        return sum(map(_bytes, thing))
    return sum(map(_bytes, vars(thing).values())) if hasattr(thing, "__dict__") else 0
