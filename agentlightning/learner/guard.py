"""The guard against a jump of the policy: how far one update has moved it, and a shorter step where that is too far.

A backtracking line search as in TRPO (Schulman et al., arXiv 1502.05477, appendix C): the step is halved until the mean
divergence of the new policy from the old one is within bounds. It is measured over whole distributions in states that
were just sampled, so that a token nobody sampled yet and that is now likely (an immediate end, say) is seen.

Shape letters: N tokens, S segments, E entries, V vocabulary.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from agentlightning.learner.base import PackedBatch
from agentlightning.learner.forward import leaf_rows

PROBE_TOKENS = 1024
"""How many tokens of a step are computed again to measure its update."""
PROBE_STATES = 256
"""In how many states distributions are compared."""
MOST_HALVINGS = 8


def probe_of(batch: PackedBatch, *, rows: bool = False) -> PackedBatch:
    """Some whole conversations of a batch, with what they share once: the first ones, and at least one. A batch that
    is small enough is its own probe.

    With `rows` they are counted as the separate rows that they are computed as.
    """
    kept_N = np.zeros(len(batch.ids_N), dtype=bool)
    entries: list[np.ndarray] = []
    tokens = 0
    for nodes_L, entries_R in leaf_rows(batch):
        more = len(nodes_L) if rows else int((~kept_N[nodes_L]).sum())
        if entries and tokens + more > PROBE_TOKENS:
            return _part_of(batch, kept_N, np.concatenate(entries))
        kept_N[nodes_L] = True
        entries.append(entries_R)
        tokens += more
    return batch


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


def probed_states(probe: PackedBatch) -> np.ndarray:
    """Which entries are looked at: all, or so many of them evenly spread."""
    count = len(probe.targets_E)
    return np.unique(np.linspace(0, count - 1, min(count, PROBE_STATES)).astype(np.int64))


def divergence(new_EV: Tensor, old_EV: Tensor) -> float:
    """Mean KL(new ‖ old) of distributions given as log-probs, in nats."""
    return float((new_EV.exp() * (new_EV - old_EV)).sum(-1).mean().clamp(min=0.0))
