"""Attention over token trees: each segment attends to its ancestors' keys and, causally, to its own.

Registered with transformers' AttentionInterface, so that the unmodified Hugging Face forward computes every node of a
tree once. Exact: a path through the tree gets the same numbers as the same tokens alone in a row.

Here by plain attention, segment by segment: on any device, and the reference for `flex_tree`, which is for GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from agentlightning.errors import ModelError
from agentlightning.learner.base import PackedBatch

NAME = "agentlightning_tree"
_MORE_THAN_SOFTMAX = ("softcap", "s_aux", "position_bias")
"""Under which names models hand their attention function what it should do to scores besides scaling them."""


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
        raise ModelError(f"{type(module).__name__} makes an attention mask of its own")
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
