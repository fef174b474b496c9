"""A packed batch cut into parts for several ranks: each entry in one part, with all that it stands on. Pure, numpy.

The loss is a sum over entries, so the parts' losses and gradients add up to those of the whole. Conversations stay
whole (sequence-level ratios need that), and groups of siblings where the loss compares them. What two parts need of the
same tree, each computes; a unit goes where it leaves the load lightest, so siblings meet where they share much.

Shape letters: N tokens, S segments, E entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from agentlightning.learner.base import PackedBatch


@dataclass(frozen=True, slots=True, eq=False)
class RankPart:
    """What one rank computes. An idle rank gets one token that counts nothing, as all ranks compute together."""

    batch: PackedBatch
    entries: np.ndarray
    """Which entries of the whole batch these are; empty for an idle rank."""


def split_batch(batch: PackedBatch, parts: int, *, whole_groups: bool = False) -> list[RankPart]:
    """So many parts of about the same number of tokens. The same batch is always cut in the same way."""
    units = _units(batch, whole_groups=whole_groups)
    ends_S = np.append(batch.starts_S[1:], len(batch.ids_N))
    lengths_S = ends_S - batch.starts_S
    taken = np.zeros((parts, len(lengths_S)), dtype=np.bool_)
    chosen: list[list[np.ndarray]] = [[] for _ in range(parts)]
    for entries, segments_S in sorted(units, key=lambda unit: -int(lengths_S[unit[1]].sum())):
        tokens = (taken | segments_S) @ lengths_S
        part = int(tokens.argmin())
        taken[part] |= segments_S
        chosen[part].append(entries)
    return [
        _part(batch, taken[p], np.sort(np.concatenate(chosen[p]))) if chosen[p] else _idle(batch) for p in range(parts)
    ]


def _units(batch: PackedBatch, *, whole_groups: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """What must stay together: entries, and which segments they stand on, bool [S]."""
    segment_E = np.searchsorted(batch.starts_S, batch.source_E, side="right") - 1
    above = _above(batch.parents_S)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    unit_E = batch.group_E if whole_groups else batch.sequence_E
    for unit in np.unique(unit_E):
        entries = np.flatnonzero(unit_E == unit)
        found.append((entries, np.logical_or.reduce(above[np.unique(segment_E[entries])], axis=0)))
    return found


def _above(parents_S: np.ndarray) -> np.ndarray:
    """Which segments each segment stands on, itself among them, bool [S, S]. Parents come before children."""
    above = np.eye(len(parents_S), dtype=np.bool_)
    for segment, parent in enumerate(parents_S.tolist()):
        if parent >= 0:
            above[segment] |= above[parent]
    return above


def _part(batch: PackedBatch, kept_S: np.ndarray, entries: np.ndarray) -> RankPart:
    """These entries and segments as a batch of their own."""
    segment_N = np.searchsorted(batch.starts_S, np.arange(len(batch.ids_N)), side="right") - 1
    kept_N = kept_S[segment_N]
    node_N = np.cumsum(kept_N) - 1
    number_S = np.cumsum(kept_S) - 1
    parents = batch.parents_S[kept_S]
    by_entry = {f: _some(getattr(batch, f), entries) for f in batch.__struct_fields__ if f.endswith(("_E", "_EK"))}
    part = msgspec.structs.replace(
        batch,
        **by_entry
        | {
            "ids_N": batch.ids_N[kept_N],
            "positions_N": batch.positions_N[kept_N],
            "starts_S": node_N[batch.starts_S[kept_S]].astype(np.int32),
            "parents_S": np.where(parents < 0, -1, number_S[parents]).astype(np.int32),
            "source_E": node_N[batch.source_E[entries]].astype(np.int32),
        },
    )
    return RankPart(part, entries)


def _some(values_E: np.ndarray | None, entries: np.ndarray) -> np.ndarray | None:
    return None if values_E is None else values_E[entries]


def _idle(batch: PackedBatch) -> RankPart:
    first = np.array([0])
    zero = np.zeros(1, dtype=np.float32)
    kept_S = np.zeros(len(batch.starts_S), dtype=np.bool_)
    kept_S[0] = True
    alone = _part(msgspec.structs.replace(batch, source_E=np.zeros_like(batch.source_E)), kept_S, first).batch
    return RankPart(
        msgspec.structs.replace(
            alone, ids_N=alone.ids_N[:1], positions_N=alone.positions_N[:1], weights_E=zero, advantages_E=zero
        ),
        np.empty(0, dtype=np.int64),
    )
