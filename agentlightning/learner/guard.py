"""The guard against a jump of the policy: how far one update has moved it, and a shorter step where that is too far.

A backtracking line search as in TRPO (Schulman et al., arXiv 1502.05477, appendix C): the step is halved until the mean
divergence of the new policy from the old one is within bounds. It is measured over whole distributions in states that
were just sampled, so that a token nobody sampled yet and that is now likely (an immediate end, say) is seen.

Shape letters: N tokens, S segments, E entries, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from agentlightning.learner.base import PackedBatch

PROBE_TOKENS = 1024
"""How many tokens of a step are computed again to measure its update."""
PROBE_STATES = 256
"""In how many states distributions are compared."""
MOST_HALVINGS = 8


def probes_of(batches: Sequence[PackedBatch]) -> list[PackedBatch]:
    """Some whole conversations of all batches of an update, at least one, with the entries to look at.

    Which they are follows from their tokens alone: however an update is packed, split or dealt among ranks, the same
    states are compared.
    """
    leaves = sorted((leaf for number, batch in enumerate(batches) for leaf in _leaves(number, batch)), key=_content)
    taken: list[_Leaf] = []
    for leaf in leaves:
        if taken and sum(one.tokens for one in taken) + leaf.tokens > PROBE_TOKENS:
            break
        taken.append(leaf)
    owners = np.concatenate([np.full(len(leaf.entries()), leaf.number) for leaf in taken])
    entries = np.concatenate([leaf.entries() for leaf in taken])
    looked_at = np.unique(np.linspace(0, len(entries) - 1, min(len(entries), PROBE_STATES)).astype(np.int64))
    owners, entries = owners[looked_at], entries[looked_at]
    probes: list[PackedBatch] = []
    for number in dict.fromkeys(owners.tolist()):
        kept_N = np.zeros(len(batches[number].ids_N), dtype=bool)
        for leaf in taken:
            if leaf.number == number:
                kept_N[leaf.nodes_L] = True
        probes.append(_part_of(batches[number], kept_N, np.unique(entries[owners == number])))
    return probes


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A conversation: the path from the root to a leaf of one of the batches."""

    number: int
    """Which batch it is in."""
    batch: PackedBatch
    nodes_L: np.ndarray
    content: bytes

    @property
    def tokens(self) -> int:
        return len(self.nodes_L)

    def entries(self) -> np.ndarray:
        """The entries on its path, by their positions."""
        entries = np.flatnonzero(np.isin(self.batch.source_E, self.nodes_L))
        return entries[np.argsort(self.batch.positions_N[self.batch.source_E[entries]], kind="stable")]


def _content(leaf: _Leaf) -> bytes:
    return leaf.content


def _leaves(number: int, batch: PackedBatch) -> Iterator[_Leaf]:
    """The leaves that have entries."""
    ends_S = np.append(batch.starts_S[1:], len(batch.ids_N))
    trained = set((np.searchsorted(batch.starts_S, batch.source_E, side="right") - 1).tolist())
    parents = set(batch.parents_S.tolist())
    for leaf in (s for s in range(len(ends_S)) if s not in parents):
        path = [leaf]
        while batch.parents_S[path[-1]] >= 0:
            path.append(int(batch.parents_S[path[-1]]))
        if trained.intersection(path):
            nodes_L = np.concatenate([np.arange(batch.starts_S[s], ends_S[s]) for s in reversed(path)])
            yield _Leaf(number, batch, nodes_L, hashlib.sha256(batch.ids_N[nodes_L].tobytes()).digest())


def _part_of(batch: PackedBatch, kept_N: np.ndarray, entries_E: np.ndarray) -> PackedBatch:
    """The batch with these nodes and entries alone. A segment is kept as a whole, and with it all that it stands on."""
    node_N = (np.cumsum(kept_N) - 1).astype(np.int32)
    kept_S = kept_N[batch.starts_S]
    segment_S = (np.cumsum(kept_S) - 1).astype(np.int32)
    parents_S = batch.parents_S[kept_S]
    return PackedBatch(
        ids_N=batch.ids_N[kept_N],
        positions_N=batch.positions_N[kept_N],
        starts_S=node_N[batch.starts_S[kept_S]],
        parents_S=np.where(parents_S >= 0, segment_S[parents_S], parents_S).astype(np.int32),
        source_E=node_N[batch.source_E[entries_E]],
        targets_E=batch.targets_E[entries_E],
        sequence_E=batch.sequence_E[entries_E],
        group_E=batch.group_E[entries_E],
        old_logprobs_E=batch.old_logprobs_E[entries_E],
        advantages_E=batch.advantages_E[entries_E],
        weights_E=batch.weights_E[entries_E],
        temperature_E=batch.temperature_E[entries_E],
        kept_EK=None if batch.kept_EK is None else batch.kept_EK[entries_E],
    )


def divergence(new_EV: Tensor, old_EV: Tensor) -> float:
    """Mean KL(new ‖ old) of distributions given as log-probs, in nats."""
    return float((new_EV.exp() * (new_EV - old_EV)).sum(-1).mean().clamp(min=0.0))
