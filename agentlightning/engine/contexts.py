"""How an engine keeps the contexts of a model: in slots where they fit, else in caches of the model's own class, and
where those are not exact not at all. So any decoder of transformers can be sampled from.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from agentlightning.engine.block_pool import BlockBudget
from agentlightning.engine.kv_cache import DoesNotFit, KVShape, probe
from agentlightning.engine.limits import slot_count
from agentlightning.engine.own_cache import OwnCacheModel, RecomputedModel
from agentlightning.engine.slot_model import SlotModel
from agentlightning.errors import ModelError
from agentlightning.models.memory import cache_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Contexts:
    """The passes of a model over `slots` contexts; they were compared with plain forwards."""

    model: SlotModel | OwnCacheModel
    slots: int
    vocab_size: int
    why_own: str = ""
    """Why they are not in slots of the KV cache; empty if they are."""
    budget: BlockBudget | None = None
    """Of memory, in blocks that follow the tokens in use; None where all slots together stay within the limit."""

    @property
    def kind(self) -> str:
        """ "slots", "own cache" or "recomputed"."""
        return {SlotModel: "slots", OwnCacheModel: "own cache", RecomputedModel: "recomputed"}[type(self.model)]

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
        contexts = _one_by_one(OwnCacheModel, model, max_context, budget, concurrency, why_own)
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
    kind: type[OwnCacheModel], model: PreTrainedModel, max_context: int, budget: int, concurrency: int, why: str
) -> Contexts:
    trial = kind(model, 1, max_context)
    vocab_size = trial.self_check()
    slots = slot_count(trial.bytes_per_context(max_context), budget, concurrency)
    passes = kind(model, slots, max_context)
    passes.continues = trial.continues
    return Contexts(passes, slots, vocab_size, why)
