"""Gated delta nets over token trees: each segment goes on from the state in which its parent ended.

Such a layer (Yang et al., arXiv 2412.06464) reads tokens one after the other. What it knows of those before are the
last inputs of a short convolution and a matrix per head, the same two things that it keeps while it generates. So the
layer's own, unmodified forward computes a few segments at the same time, and is given, as if that were its cache, the
states that their parents ended with. Gradients flow back the same way. Exact, on any device.

Shape letters: N tokens, S segments, C segments computed together, L tokens of the longest, H hidden size, D channels of
the convolution, K tokens that it sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from agentlightning.learner.base import PackedBatch

GATES = {
    "Qwen3NextGatedDeltaNet": ("in_proj_ba",),
    "Qwen3_5GatedDeltaNet": ("in_proj_b", "in_proj_a"),
    "Qwen3_5MoeGatedDeltaNet": ("in_proj_b", "in_proj_a"),
    "OlmoHybridGatedDeltaNet": ("b_proj", "a_proj"),
}
"""The layers that are known, by class: the parts that say how much of a token is written to the state, by a sigmoid,
and how much the state decays, by a softplus. A token for which they say minus infinity leaves the state as it is."""
FEWEST_TOKENS = 2
"""Given one, a layer takes what it generates with, for which fused kernels have no gradient."""


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of the classes that are known."""
    return [module for module in model.modules() if type(module).__name__ in GATES]


@dataclass(frozen=True, slots=True, eq=False)
class SegmentGroup:
    """Segments at the same depth and of like length, computed in one padded call."""

    segments: tuple[int, ...]
    parents: tuple[int, ...]
    """Of each; empty for roots."""
    lengths: tuple[int, ...]
    nodes_CL: Tensor
    """Where in N their tokens are; padding repeats the last one."""
    padding_CL1: Tensor | None
    """Bool; None where all are of one length."""


@dataclass(frozen=True, slots=True, eq=False)
class RecurrencePlan:
    """Which segments are computed together, parents before children."""

    groups: tuple[SegmentGroup, ...]
    places_N: Tensor
    """Where each token is in what the groups give, one after the other."""
    handed_on: frozenset[int]
    """The segments that others go on from."""


def plan_recurrence(batch: PackedBatch, device: torch.device, max_waste: float = 1.3) -> RecurrencePlan:
    """Group segments of one depth by length; padding adds at most a factor `max_waste` to a group's longest segment."""
    lengths_S = np.diff(np.append(batch.starts_S, len(batch.ids_N)))
    groups: list[SegmentGroup] = []
    places_N, given = np.zeros(len(batch.ids_N), dtype=np.int64), 0
    for segments in _alike(batch.parents_S.tolist(), lengths_S.tolist(), max_waste):
        lengths_C1, starts_C1 = lengths_S[segments, None], batch.starts_S[segments, None]
        step_L = np.arange(max(lengths_C1.max(), FEWEST_TOKENS))
        nodes_CL, own_CL = starts_C1 + np.minimum(step_L, lengths_C1 - 1), step_L < lengths_C1
        places_N[nodes_CL[own_CL]] = given + np.flatnonzero(own_CL)
        given += own_CL.size
        groups.append(
            SegmentGroup(
                segments=tuple(segments),
                parents=tuple(p for p in batch.parents_S[segments].tolist() if p >= 0),
                lengths=tuple(lengths_S[segments].tolist()),
                nodes_CL=torch.as_tensor(nodes_CL.astype(np.int64), device=device),
                padding_CL1=None if own_CL.all() else torch.as_tensor(~own_CL[..., None], device=device),
            )
        )
    handed_on = frozenset(batch.parents_S.tolist())
    return RecurrencePlan(tuple(groups), torch.as_tensor(places_N, device=device), handed_on)


def _alike(parents: list[int], lengths: list[int], max_waste: float) -> Iterator[list[int]]:
    """Segments at the same depth and of like length, parents before children."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    for depth in range(max(depths) + 1):
        members = sorted((s for s, d in enumerate(depths) if d == depth), key=lambda s: lengths[s])
        while members:
            count = sum(1 for s in members if lengths[s] * max_waste + 4 >= lengths[members[-1]])
            yield members[-count:]
            del members[-count:]


class _Branches:
    """What a layer is given for a cache while it computes a group; its methods are those that the layer calls.

    The convolution's inputs are not asked for but put before the new ones, as they are where several tokens are given.
    """

    def __init__(self) -> None:
        self.group: SegmentGroup
        self.inputs_S: dict[int, Tensor] = {}
        """By segment that was computed, the last inputs of the convolution, [D, K - 1]."""
        self.states_S: dict[int, Tensor] = {}
        """And the recurrent state."""

    def get_conv_state(self, *_: object, **__: object) -> None:
        return None

    def get_recurrent_state(self, *_: object, **__: object) -> Tensor | None:
        parents = self.group.parents
        return torch.stack([self.states_S[p] for p in parents]) if parents else None

    def update_conv_state(self, inputs_CDL: Tensor, *_: object, conv_kernel_size: int, **__: object) -> Tensor:
        before, parents = conv_kernel_size - 1, self.group.parents
        if parents:
            known = torch.cat([torch.stack([self.inputs_S[p] for p in parents]), inputs_CDL], dim=2)
        else:
            known = pad(inputs_CDL, (before, 0))
        for segment, length, row in zip(self.group.segments, self.group.lengths, known.unbind(), strict=True):
            self.inputs_S[segment] = row[:, length : length + before]
        return known

    def update_recurrent_state(self, states: Tensor, *_: object, **__: object) -> None:
        self.states_S |= zip(self.group.segments, states.unbind(), strict=True)

    def forget(self, handed_on: frozenset[int]) -> None:
        """Keep nothing of this group's leaves."""
        for segment in set(self.group.segments) - handed_on:
            del self.inputs_S[segment], self.states_S[segment]


@contextmanager
def tree_recurrence(layers: Sequence[nn.Module], plan: RecurrencePlan) -> Iterator[None]:
    """Within the block these layers compute a packed row, [1, N, H], as the tree that it is."""
    for layer in layers:
        layer.forward = partial(_forward, layer, plan)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _forward(layer: nn.Module, plan: RecurrencePlan, hidden_states: Tensor, **_: object) -> Tensor:
    """What the layer's own forward gives for every segment after all it stands on."""
    branches = _Branches()
    found: list[Tensor] = []
    for branches.group in plan.groups:
        nodes_CL = branches.group.nodes_CL
        hidden_CLH = hidden_states[0].index_select(0, nodes_CL.flatten()).view(*nodes_CL.shape, -1)
        with _neutral(layer, branches.group.padding_CL1):
            found.append(type(layer).forward(layer, hidden_CLH, cache_params=branches).flatten(0, 1))
        branches.forget(plan.handed_on)
    return torch.cat(found).index_select(0, plan.places_N)[None]


@contextmanager
def _neutral(layer: nn.Module, padding_CL1: Tensor | None) -> Iterator[None]:
    """Within the block padding leaves the layer's state as it is."""
    with ExitStack() as hooks:
        if padding_CL1 is not None:
            for name in GATES[type(layer).__name__]:
                gate = layer.get_submodule(name)
                hooks.enter_context(
                    gate.register_forward_hook(lambda _, __, out: out.masked_fill(padding_CL1, -torch.inf))
                )
        yield
