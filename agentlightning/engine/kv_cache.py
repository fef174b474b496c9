"""The KV cache of the embedded engine: a fixed number of slots, each with addresses for one whole context.

A Hugging Face `Cache` whose `update` writes new keys and values straight into slots and hands the attention a view of
them, so a decoding step copies nothing. It knows tensors only; which tokens a slot holds is `Slots`' business.

The cache's tensors keep their plain layout, so that attention reads them as views, and memory follows what is written:
pages of the operating system are there where something was written, and can be given back (as Prabhu et al.,
vAttention, arXiv 2405.04437, do on GPUs). Linux only: elsewhere pages do not come back as zeros.

Shape letters: L layers, S slots, C tokens of a slot, R rows of a pass, Q new tokens per row, T tokens attended to, H
key/value heads, D head size.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

SUPPORTED_ATTENTION = ("sdpa", "eager")


_KEYS_AND_VALUES = {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}
"""transformers' layers of which slots keep the same; a window is a matter of the mask."""


class DoesNotFit(Exception):
    """Slots cannot hold a model's context; the message says why."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a model keeps per token, found by running it on one token."""

    layers: tuple[tuple[int, int, int], ...]
    """Of each layer: heads, and the sizes of a head's key and value."""
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return sum(heads * (key + value) for heads, key, value in self.layers) * self.dtype.itemsize

    @property
    def block(self) -> int | None:
        """Tokens of a block of memory that can be given back; None where memory stays taken, as on GPUs."""
        if not SUPPORTED or self.device.type != "cpu":
            return None
        return block_tokens(h * size * self.dtype.itemsize for h, key, value in self.layers for size in (key, value))


@torch.inference_mode()
def probe(model: PreTrainedModel) -> KVShape:
    """The shape of the model's keys and values. Raises `DoesNotFit` where it keeps something else."""
    attention = model.config._attn_implementation
    if attention not in SUPPORTED_ATTENTION:
        raise DoesNotFit(f"it was loaded with attn_implementation={attention!r}, not one of {SUPPORTED_ATTENTION}")
    if "local" in model.config.to_dict().get("attention_layers", ()):
        raise DoesNotFit("its local attention is not in the masks that it is given")
    cache = DynamicCache(config=model.config)
    others = sorted({type(layer).__name__ for layer in cache.layers} - _KEYS_AND_VALUES)
    if others:
        raise DoesNotFit(f"some layers cache something other than keys and values ({', '.join(others)})")
    device = next(model.parameters()).device
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), past_key_values=cache, use_cache=True)
    layers: list[Any] = cache.layers
    if not layers or any(not layer.is_initialized for layer in layers):
        raise DoesNotFit("some layers have no cache of their own")
    shapes = tuple((layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in layers)
    return KVShape(shapes, layers[0].keys.dtype, device)


class SlotCache(Cache):
    """Keys and values of all slots. Call `plan` before each pass of the model."""

    def __init__(self, shape: KVShape, slots: int, capacity: int, *, paged: bool = False) -> None:
        """`paged`: memory of a slot can be given back; its capacity is then a whole number of blocks."""
        super().__init__(layers=[])
        self.capacity = capacity
        self._paged: list[tuple[_MemoryPages, torch.Tensor]] = []
        # Layers of one shape lie in one tensor [L, S, C, H, D], so that a slot is copied in one go.
        self._groups: list[torch.Tensor] = []
        by_layer: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for heads, key_size, value_size in dict.fromkeys(shape.layers):
            members = [n for n, layer in enumerate(shape.layers) if layer == (heads, key_size, value_size)]
            size = (len(members), slots, capacity, heads)
            keys, values = (self._make((*size, d), shape, paged=paged) for d in (key_size, value_size))
            self._groups += [keys, values]
            by_layer.update(zip(members, zip(keys, values, strict=True), strict=True))
        self._layers = [by_layer[n] for n in range(len(shape.layers))]
        self._flat = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in self._layers]
        self._rows: slice | torch.Tensor = slice(0, 0)
        self._write = torch.empty(0, dtype=torch.long)
        self._query = 0
        self._context = 0

    def _make(self, size: tuple[int, ...], shape: KVShape, *, paged: bool) -> torch.Tensor:
        if not paged:
            return _zeros(size, shape)
        pages = _MemoryPages(math.prod(size) * shape.dtype.itemsize)
        tensor = pages.tensor(size, shape.dtype)
        self._paged.append((pages, tensor))
        return tensor

    def plan(self, rows: slice | torch.Tensor, write: torch.Tensor, context: int, query: int) -> None:
        """Set up one pass of `query` new tokens per row.

        Its rows [R] are these slots, its new tokens go to `write` [R * Q] (slot * capacity + position), and it attends
        to the first `context` tokens of the slots, as far as the mask lets it.
        """
        self._rows = rows
        self._write = write
        self._context = context
        self._query = query

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the pass's new keys and values [R, H, Q, D]; return those to attend to [R, H, T, D]."""
        flat_keys, flat_values = self._flat[layer_idx]
        flat_keys.index_copy_(0, self._write, key_states.transpose(1, 2).flatten(0, 1))
        flat_values.index_copy_(0, self._write, value_states.transpose(1, 2).flatten(0, 1))
        keys, values = self._layers[layer_idx]
        return (
            keys[self._rows, : self._context].transpose(1, 2),
            values[self._rows, : self._context].transpose(1, 2),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the pass's new ones. Only asked for when a model ignores the positions it is given."""
        return self._context - self._query

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._context, 0

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of one slot to another."""
        for tensor in self._groups:
            tensor[:, target, :tokens] = tensor[:, source, :tokens]

    def swap(self, a: int, b: int, tokens_a: int, tokens_b: int) -> None:
        """Exchange what two slots hold: the first so many tokens of each."""
        for tensor in self._groups:
            kept = tensor[:, a, :tokens_a].clone()
            tensor[:, a, :tokens_b] = tensor[:, b, :tokens_b]
            tensor[:, b, :tokens_a] = kept

    def clear(self, slot: int) -> None:
        """Zero a slot. Needed after NaN only: masked-out NaN values would still poison the attention's sum."""
        if self._paged:
            self.give_back(slot, 0)
            return
        for tensor in self._groups:
            tensor[:, slot] = 0

    def give_back(self, slot: int, tokens: int) -> None:
        """Free the memory of a slot behind its first so many tokens, whole blocks; it reads as zeros afterwards."""
        for pages, tensor in self._paged:
            token = tensor.stride(2) * tensor.itemsize
            for layer in range(len(tensor)):
                start = (layer * tensor.stride(0) + slot * tensor.stride(1)) * tensor.itemsize
                pages.give_back(start + tokens * token, (self.capacity - tokens) * token)


def _zeros(size: tuple[int, ...], shape: KVShape) -> torch.Tensor:
    """Zeros that take no memory until they are written, where the operating system can do that."""
    if shape.device.type != "cpu":
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    raw = np.zeros((*size[:-1], size[-1] * shape.dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(raw).view(shape.dtype)


SUPPORTED = sys.platform == "linux"
_LARGEST_BLOCK = 256
_SMALLEST_BLOCK = 16
"""Tokens."""
_NORESERVE = 0x4000  # not among Python's names: addresses alone are asked for, more than there is memory


class _MemoryPages:
    """Memory at new addresses, which reads as zeros. Raises OSError where the system does not hand out so many."""

    def __init__(self, size: int) -> None:
        self._area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        with suppress(OSError):  # a kernel without huge pages, which would be taken for a few tokens
            self._area.madvise(mmap.MADV_NOHUGEPAGE)

    def tensor(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """All of the memory as a tensor, which keeps it alive."""
        return torch.frombuffer(self._area, dtype=dtype).view(size)

    def give_back(self, start: int, size: int) -> None:
        """Free the pages of these bytes, which read as zeros from now on. Both are multiples of a page."""
        self._area.madvise(mmap.MADV_DONTNEED, start, size)


def block_tokens(row_bytes: Iterable[int]) -> int | None:
    """The smallest number of tokens that fill whole pages in every layer; None where that would be too many."""
    whole = math.lcm(_SMALLEST_BLOCK, *(mmap.PAGESIZE // math.gcd(size, mmap.PAGESIZE) for size in row_bytes))
    return whole if whole <= _LARGEST_BLOCK else None
