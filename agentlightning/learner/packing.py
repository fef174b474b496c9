"""Packing: token trees and what to learn from them → the arrays of one pass. Pure; numpy only.

A sampled token is one loss entry, of the call that sampled it; where it stands again in the prompt of a later call it
is context and is not trained a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentlightning.adapter.tree import TokenTree, build_tree
from agentlightning.learner.base import PackedBatch
from agentlightning.types.call import Call, Float32Array


@dataclass(frozen=True, slots=True, eq=False)
class CreditedCall:
    """A call and what its sampled tokens are worth. Arrays have one value per sampled token."""

    call: Call
    sequence: int
    """The rollout it belongs to, numbered within the step."""
    group: int
    """The group of siblings, which is kept together in one pass."""
    advantages: Float32Array
    weights: Float32Array


def pack(credited: Sequence[CreditedCall]) -> PackedBatch:
    """All calls as one forest with their loss entries."""
    tree = build_tree([np.concatenate((c.call.prompt_ids, c.call.response_ids)) for c in credited])
    sources = [_sources(tree, i, c.call) for i, c in enumerate(credited)]
    lengths = [len(c.call.response_ids) for c in credited]
    return PackedBatch(
        ids_N=tree.ids_N,
        positions_N=tree.positions_N,
        starts_S=tree.starts_S,
        parents_S=tree.parents_S,
        source_E=np.concatenate(sources),
        targets_E=np.concatenate([c.call.response_ids for c in credited]),
        sequence_E=np.repeat(np.array([c.sequence for c in credited], dtype=np.int32), lengths),
        old_logprobs_E=np.concatenate([c.call.plain_logprobs for c in credited]),
        advantages_E=np.concatenate([c.advantages for c in credited]),
        weights_E=np.concatenate([c.weights for c in credited]),
        temperature_E=np.repeat(
            np.array([c.call.info.temperature or 1.0 for c in credited], dtype=np.float32), lengths
        ),
    )


def _sources(tree: TokenTree, index: int, call: Call) -> np.ndarray:
    first = len(call.prompt_ids) - 1
    return tree.locate(index, np.arange(first, first + len(call.response_ids), dtype=np.int32))


def split_by_budget(credited: Sequence[CreditedCall], max_tokens: int) -> list[list[CreditedCall]]:
    """Micro-batches of whole groups with about `max_tokens` tree tokens each (a group over the budget stands alone).

    Tokens are counted as each rollout's longest sequence, less the prefix that its group shares: an upper bound.
    """
    groups: dict[int, list[CreditedCall]] = {}
    for c in credited:
        groups.setdefault(c.group, []).append(c)
    batches: list[list[CreditedCall]] = []
    room = 0
    for members in groups.values():
        cost = _unique_tokens(members)
        if not batches or cost > room:
            batches.append([])
            room = max_tokens
        batches[-1].extend(members)
        room -= cost
    return batches


def _unique_tokens(members: Sequence[CreditedCall]) -> int:
    return len(build_tree([np.concatenate((c.call.prompt_ids, c.call.response_ids)) for c in members]).ids_N)
