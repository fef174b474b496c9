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


def probe_of(batch: PackedBatch) -> PackedBatch:
    """Some whole conversations of a batch, as separate rows: the first ones, and at least one."""
    rows: list[np.ndarray] = []
    entries: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    start = 0
    for nodes_L, entries_R in leaf_rows(batch):
        if rows and start + len(nodes_L) > PROBE_TOKENS:
            break
        rows.append(nodes_L)
        entries.append(entries_R)
        sources.append(start + batch.positions_N[batch.source_E[entries_R]])
        start += len(nodes_L)
    nodes_N, entries_E = np.concatenate(rows), np.concatenate(entries)
    lengths = np.array([len(row) for row in rows])
    return PackedBatch(
        ids_N=batch.ids_N[nodes_N],
        positions_N=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        starts_S=np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int32),
        parents_S=np.full(len(rows), -1, dtype=np.int32),
        source_E=np.concatenate(sources).astype(np.int32),
        targets_E=batch.targets_E[entries_E],
        sequence_E=batch.sequence_E[entries_E],
        group_E=batch.group_E[entries_E],
        old_logprobs_E=batch.old_logprobs_E[entries_E],
        advantages_E=batch.advantages_E[entries_E],
        weights_E=batch.weights_E[entries_E],
        temperature_E=batch.temperature_E[entries_E],
    )


def probed_states(probe: PackedBatch) -> np.ndarray:
    """Which entries are looked at: all, or so many of them evenly spread."""
    count = len(probe.targets_E)
    return np.unique(np.linspace(0, count - 1, min(count, PROBE_STATES)).astype(np.int64))


def divergence(new_EV: Tensor, old_EV: Tensor) -> float:
    """Mean KL(new ‖ old) of distributions given as log-probs, in nats."""
    return float((new_EV.exp() * (new_EV - old_EV)).sum(-1).mean().clamp(min=0.0))
