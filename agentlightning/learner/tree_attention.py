"""Attention over token trees: each segment attends to its ancestors' keys and, causally, to its own.

Registered with transformers' AttentionInterface, so that the unmodified Hugging Face forward computes every node of a
tree once. Exact: a path through the tree gets the same numbers as the same tokens alone in a row. There are two ways:

`TreePlan`: plain attention, segment by segment. For any device, and the reference for the other way.

`FlexTree`: one kernel, PyTorch's FlexAttention (Dong et al., arXiv 2412.05496) with a block mask, for GPUs. Tokens lie
depth first, so what stands on a token follows it without a gap: token q attends to token k where k is not behind q and
q comes before the end of k's subtree. One number per token is enough for that, and one maximum and one minimum per
block of tokens show which blocks of queries and keys have a pair to compute: exactly those are computed. Trees that
share nothing are rows without padding. On a CPU, where FlexAttention has no gradient, the block mask is written out in
full, N × N, for PyTorch's plain attention: a reference, not a fast way.

Shape letters: N tokens, P tokens with padding to whole blocks, B blocks, S segments, H and K heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from agentlightning.errors import ModelError
from agentlightning.learner.base import PackedBatch

NAME = "agentlightning_tree"
_MORE_THAN_SOFTMAX = ("softcap", "s_aux", "position_bias")
"""Arguments by which models ask their attention function to do more to scores than scale them."""


@contextmanager
def tree_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within the block, the model's attention layers take the `tree` plan that is passed to its forward."""
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


class Tree(Protocol):
    """A token tree, as far as attention goes."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """query [1, H, N, D]; key and value [1, K, N, D] with H a multiple of K. Returns [1, H, N, D]."""
        ...


@dataclass(frozen=True, slots=True)
class Family:
    """Segments with the same parent, whose attention is computed in one padded call. C children."""

    ancestors: tuple[int, ...]
    """Segments from the root to the parent."""
    children: tuple[int, ...]
    mask: Tensor | None
    """Bool, [longest child, ancestors' tokens + longest child]; None where plain causal attention does (roots)."""


@dataclass(frozen=True, slots=True)
class TreePlan:
    """How to cut a packed row into segments, and which of them attend to which."""

    lengths: tuple[int, ...]
    families: tuple[Family, ...]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """As `Tree.attend`."""
        q, k, v = (t.split(self.lengths, dim=2) for t in (query, key, value))
        out: list[Tensor | None] = [None] * len(self.lengths)
        for family in self.families:
            longest = self.lengths[family.children[-1]]
            attended = scaled_dot_product_attention(
                _stack(q, family.children, longest),
                _with_ancestors(k, family, longest),
                _with_ancestors(v, family, longest),
                attn_mask=family.mask,
                is_causal=family.mask is None,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            for row, child in enumerate(family.children):
                out[child] = attended[row : row + 1, :, : self.lengths[child]]
        return torch.cat([o for o in out if o is not None], dim=2)


def plan_tree(batch: PackedBatch, device: torch.device, max_waste: float = 1.3) -> TreePlan:
    """Group siblings of similar length; padding adds at most a factor `max_waste` to a family's longest child."""
    ends = [*batch.starts_S.tolist()[1:], len(batch.ids_N)]
    lengths = [end - start for start, end in zip(batch.starts_S.tolist(), ends, strict=True)]
    parents = batch.parents_S.tolist()
    siblings: dict[int, list[int]] = {}
    for segment, parent in enumerate(parents):
        siblings.setdefault(parent, []).append(segment)
    families: list[Family] = []
    for parent, members in siblings.items():
        above = _path_to(parent, parents)
        past = sum(lengths[s] for s in above)
        members.sort(key=lambda s: lengths[s])
        while members:
            longest = lengths[members[-1]]
            count = sum(1 for s in members if lengths[s] * max_waste + 4 >= longest)
            children, members = tuple(members[-count:]), members[:-count]
            families.append(Family(above, children, _mask(past, longest, device) if past else None))
    return TreePlan(tuple(lengths), tuple(families))


def _path_to(segment: int, parents: list[int]) -> tuple[int, ...]:
    path: list[int] = []
    while segment >= 0:
        path.append(segment)
        segment = parents[segment]
    return tuple(reversed(path))


def _mask(past: int, own: int, device: torch.device) -> Tensor:
    mask = torch.ones(own, past + own, dtype=torch.bool, device=device)
    mask[:, past:].tril_()
    return mask


def _tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree: Tree | None = None,
    **given: object,
) -> tuple[Tensor, None]:
    """query [1, H, N, D]; key and value [1, K, N, D] with H a multiple of K. Returns [1, N, H, D].

    Raises `ModelError` where the model wants more of its attention than this.
    """
    if tree is None:
        raise ModelError(f"{type(module).__name__} does not pass the tree on to its attention function")
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} makes its own attention mask")
    if more := [name for name in _MORE_THAN_SOFTMAX if given.get(name) is not None]:
        raise ModelError(f"its attention does more to scores than a softmax ({', '.join(more)})")
    return tree.attend(query, key, value, scaling).transpose(1, 2).contiguous(), None


def _stack(parts: tuple[Tensor, ...], children: tuple[int, ...], longest: int) -> Tensor:
    """Children's pieces padded at the end to one length, [C, H, longest, D]; causality keeps padding out of sight."""
    padded = [
        part if part.shape[2] == longest else torch.nn.functional.pad(part, (0, 0, 0, longest - part.shape[2]))
        for part in (parts[c] for c in children)
    ]
    return torch.cat(padded, dim=0)


def _with_ancestors(parts: tuple[Tensor, ...], family: Family, longest: int) -> Tensor:
    own = _stack(parts, family.children, longest)
    if not family.ancestors:
        return own
    above = torch.cat([parts[s] for s in family.ancestors], dim=2)
    return torch.cat([above.expand(own.shape[0], -1, -1, -1), own], dim=2)


AttentionInterface.register(NAME, _tree_attention)  # transformers' own registry; it has no other way in


BLOCK = 128
"""Tokens of a block, what FlexAttention's kernels are tuned for."""
_FEWEST_BLOCKS = 2
"""The fewest blocks of a mask: kernels for a single one, or for less than one, would be compiled separately."""
_MOST_KERNELS = 64
"""Kernels are compiled for any number of tokens; these may differ in heads, dtype and whether there is a gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class FlexTree:
    """Which tokens of a packed tree attend to which, for one kernel."""

    blocks: BlockMask
    dense_PP: Tensor | None
    """The mask token by token; on a CPU only."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """query [1, H, N, D]; key and value [1, K, N, D] with H a multiple of K. Returns [1, H, N, D]."""
        tokens = query.shape[2]
        more = self.blocks.shape[-1] - tokens
        q, k, v = (pad(t, (0, 0, 0, more)) for t in (query, key, value))
        if self.dense_PP is not None:
            gqa = query.shape[1] != key.shape[1]
            found = scaled_dot_product_attention(q, k, v, attn_mask=self.dense_PP, scale=scaling, enable_gqa=gqa)
        else:
            # Beyond the limit torch would compute without a kernel, N × N: an error is better.
            with torch._dynamo.config.patch(recompile_limit=_MOST_KERNELS):
                found = fused()(q, k, v, self.blocks, scaling)
        return found[:, :, :tokens]


@cache
def fused() -> Callable[[Tensor, Tensor, Tensor, BlockMask, float | None], Tensor]:
    """FlexAttention as a kernel, compiled when it is called: once for all numbers of tokens, as far as torch can."""

    def attention(query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask, scaling: float | None) -> Tensor:
        gqa = query.shape[1] != key.shape[1]
        return flex_attention(query, key, value, block_mask=blocks, scale=scaling, enable_gqa=gqa)  # pyright: ignore

    return torch.compile(attention, dynamic=True, fullgraph=True)


def plan_flex(batch: PackedBatch, device: torch.device) -> FlexTree:
    """The tree of a batch as a block mask."""
    blocks = block_mask(subtree_ends(batch), device)
    return FlexTree(blocks, _dense(blocks) if device.type == "cpu" else None)


def subtree_ends(batch: PackedBatch) -> np.ndarray:
    """For each token, where in N the tokens that stand on it end. Raises ValueError unless segments lie depth first."""
    ends_S = np.append(batch.starts_S[1:], len(batch.ids_N)).astype(np.int32)
    lengths_S = ends_S - batch.starts_S
    sizes_S = lengths_S.copy()
    for segment in reversed(range(len(ends_S))):
        if (parent := batch.parents_S[segment]) >= 0:
            ends_S[parent] = max(ends_S[parent], ends_S[segment])
            sizes_S[parent] += sizes_S[segment]
    if (ends_S - batch.starts_S != sizes_S).any():
        raise ValueError("The segments of this tree do not lie depth first: something stands between a subtree's own.")
    return np.repeat(ends_S, lengths_S)


def block_mask(ends_N: np.ndarray, device: torch.device) -> BlockMask:
    """Each token attends to those at or before it whose subtree it is in. Padding attends to itself."""
    count = max(-(-len(ends_N) // BLOCK), _FEWEST_BLOCKS)
    padding = np.arange(len(ends_N), count * BLOCK, dtype=np.int32) + 1
    ends_P = torch.as_tensor(np.concatenate([ends_N, padding]), device=device)
    ends_BL = ends_P.view(count, BLOCK)
    block_B = torch.arange(count, device=device)
    query_BB, key_BB, start_BB = block_B[:, None], block_B[None], BLOCK * block_B[:, None]
    some_BB = (key_BB <= query_BB) & (ends_BL.amax(1)[None] > start_BB)
    all_BB = (key_BB < query_BB) & (ends_BL.amin(1)[None] >= start_BB + BLOCK)

    def attends(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < ends_P[k])

    return BlockMask.from_kv_blocks(*_listed(some_BB & ~all_BB), *_listed(all_BB), BLOCK_SIZE=BLOCK, mask_mod=attends)


def _listed(wanted_BB: Tensor) -> tuple[Tensor, Tensor]:
    """For each block of queries: how many blocks of keys are wanted, and which, those first."""
    which_BB = wanted_BB.int().argsort(dim=-1, descending=True, stable=True)
    return wanted_BB.sum(-1, dtype=torch.int32)[None, None], which_BB.int()[None, None]


def _dense(blocks: BlockMask) -> Tensor:
    """Token by token, [P, P]: what is attended in the blocks that are computed."""
    token_P = torch.arange(blocks.shape[-1])
    attended_PP = blocks.mask_mod(token_P, token_P, token_P[:, None], token_P[None])
    computed_BB = blocks.to_dense()[0, 0].bool()
    return attended_PP & computed_BB.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
