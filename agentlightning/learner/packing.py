"""Packing: token trees and what to learn from them → the arrays of one pass; and such a batch cut into parts for
several ranks. Pure; numpy only.

A sampled token is one loss entry, of the call that sampled it; where it stands again in the prompt of a later call it
is context and is not trained a second time.

The loss is a sum over entries, so the losses and gradients of parts add up to those of the whole. Each entry is in one
part, with all that it stands on. Conversations stay whole (sequence-level ratios need that), and so do groups of
siblings where the loss compares them. What two parts need of the same tree, each computes; a unit goes where it leaves
the load lightest, so siblings meet where they share much.

Shape letters: N tokens, S segments, E entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from agentlightning.adapter.tree import TokenTree, build_tree
from agentlightning.learner.base import PackedBatch
from agentlightning.types.arrays import Float32Array, Int32Array, kept_table, np
from agentlightning.types.call import Call


@dataclass(frozen=True, slots=True, eq=False)
class CreditedCall:
    """A call and what its sampled tokens are worth. Arrays have one value per sampled token."""

    call: Call
    sequence: int
    """The conversation it belongs to, numbered within the step; never split between passes."""
    group: int
    """The group of siblings."""
    advantages: Float32Array
    weights: Float32Array
    returns: Float32Array | None = None
    """What a critic should predict; all calls of a batch have it, or none."""


def pack(credited: Sequence[CreditedCall]) -> PackedBatch:
    """All calls as one forest with their loss entries."""
    tree = build_tree([np.concatenate((c.call.prompt_ids, c.call.response_ids)) for c in credited])
    sources = [_sources(tree, i, c.call) for i, c in enumerate(credited)]
    lengths = [len(c.call.response_ids) for c in credited]
    returned = all(c.returns is not None for c in credited)
    kept_EK = _kept([kept_table(c.call.kept, len(c.call.response_ids)) for c in credited])
    return PackedBatch(
        ids_N=tree.ids_N,
        positions_N=tree.positions_N,
        starts_S=tree.starts_S,
        parents_S=tree.parents_S,
        source_E=np.concatenate(sources),
        targets_E=np.concatenate([c.call.response_ids for c in credited]),
        sequence_E=np.repeat(np.array([c.sequence for c in credited], dtype=np.int32), lengths),
        group_E=np.repeat(np.array([c.group for c in credited], dtype=np.int32), lengths),
        old_logprobs_E=np.concatenate([_old_logprobs(c.call) for c in credited]),
        advantages_E=np.concatenate([c.advantages for c in credited]),
        weights_E=np.concatenate([c.weights for c in credited]),
        temperature_E=np.repeat(
            np.array([c.call.info.temperature or 1.0 for c in credited], dtype=np.float32), lengths
        ),
        returns_E=np.concatenate([c.returns for c in credited if c.returns is not None]) if returned else None,
        version_E=np.concatenate([_versions(c.call) for c in credited]),
        kept_EK=kept_EK if kept_EK.shape[1] else None,
    )


def _kept(tables: Sequence[Int32Array]) -> Int32Array:
    """The tables of all calls as one, as wide as the widest."""
    wide = max(table.shape[1] for table in tables)
    return np.concatenate([np.pad(t, ((0, 0), (0, wide - t.shape[1])), constant_values=-1) for t in tables])


def is_kept(call: Call) -> np.ndarray:
    """Whether it is known what a filter left to draw each sampled token from, bool [R]."""
    tokens = len(call.response_ids)
    return np.zeros(tokens, dtype=np.bool_) if call.kept is None else call.kept[:tokens] > 0


def _old_logprobs(call: Call) -> Float32Array:
    """Over what the learner takes its own: what a filter left, where that is known, else the whole vocabulary."""
    return call.plain_logprobs if call.kept is None else np.where(is_kept(call), call.logprobs, call.plain_logprobs)


def _versions(call: Call) -> Int32Array:
    """The weight version of each sampled token, -1 if unknown."""
    version_R = np.full(len(call.response_ids), -1, dtype=np.int32)
    for run in call.versions:
        version_R[run.start :] = run.version
    return version_R


def _sources(tree: TokenTree, index: int, call: Call) -> np.ndarray:
    first = len(call.prompt_ids) - 1
    return tree.locate(index, np.arange(first, first + len(call.response_ids), dtype=np.int32))


def split_by_budget(
    credited: Sequence[CreditedCall], max_tokens: int, *, whole_groups: bool = False
) -> list[list[CreditedCall]]:
    """Micro-batches of about `max_tokens` tree tokens, the largest first, so that memory that is short shows at once.

    Groups stay together where they fit. A group over the budget is split into conversations in the order of their
    tokens, so that those which share much meet again; a conversation over the budget stands alone. Loss functions
    that compare siblings need `whole_groups`.
    """
    units: list[tuple[list[CreditedCall], int]] = []
    for members in _by(credited, lambda c: c.group):
        tokens = unique_tokens(members)
        if tokens <= max_tokens or whole_groups:
            units.append((members, tokens))
        else:
            units.extend(_fill([(m, unique_tokens(m)) for m in _conversations(members)], max_tokens))
    return [calls for calls, _ in sorted(_fill(units, max_tokens), key=lambda unit: -unit[1])]


def _fill(units: list[tuple[list[CreditedCall], int]], max_tokens: int) -> list[tuple[list[CreditedCall], int]]:
    """Join neighbours while their tokens, counted as if they shared none, fit."""
    filled: list[tuple[list[CreditedCall], int]] = []
    for calls, tokens in units:
        if filled and filled[-1][1] + tokens <= max_tokens:
            before, count = filled.pop()
            filled.append(([*before, *calls], count + tokens))
        else:
            filled.append((list(calls), tokens))
    return filled


def _conversations(members: Sequence[CreditedCall]) -> list[list[CreditedCall]]:
    return sorted(_by(members, lambda c: c.sequence), key=lambda calls: calls[-1].call.prompt_ids.tolist())


def _by(credited: Sequence[CreditedCall], key: Callable[[CreditedCall], int]) -> list[list[CreditedCall]]:
    found: dict[int, list[CreditedCall]] = {}
    for c in credited:
        found.setdefault(key(c), []).append(c)
    return list(found.values())


def unique_tokens(members: Sequence[CreditedCall]) -> int:
    """Tokens of the calls' token tree."""
    return len(build_tree([np.concatenate((c.call.prompt_ids, c.call.response_ids)) for c in members]).ids_N)


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
