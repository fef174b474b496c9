"""A packed batch as rows of tokens, and rows dealt among workers. Pure, numpy.

verl computes log-probs of each row's own next tokens, at one temperature for the row. So an entry stands in a row in
which its target comes next: that of a leaf below the target, and entries of another temperature in a row of their own.

Shape letters: L tokens of a row, N tokens and E entries of a batch, S segments, R entries of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from agentlightning.learner.base import PackedBatch
from agentlightning.learner.packing import split_batch

ROW_TOKENS = 8192
"""Tokens of rows that a worker computes at once, unless what belongs together has more."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A path from the root as far as its entries need it."""

    ids_L: np.ndarray
    entries_R: np.ndarray
    """Which entries of the whole batch are learned in it."""
    sources_R: np.ndarray
    """Where in the row each one's source is: the token after it is its target."""
    temperature: float


EMPTY = Row(np.zeros(2, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64), 1.0)
"""For a worker that has fewer rows than another, as all have as many."""

Pass = list[list[Row]]
"""For each worker its rows, all as many; a worker may have nothing but empty ones."""


def passes_of(batch: PackedBatch, workers: int, *, whole_groups: bool, row_tokens: int = ROW_TOKENS) -> list[Pass]:
    """So many workers' rows, in as many passes as `row_tokens` makes it. Conversations (or groups) stay whole."""
    tokens = sum(len(row.ids_L) for row in rows_of(batch))
    many = -(-tokens // (workers * row_tokens))
    parts = [
        [row_in(part.entries, row) for row in rows_of(part.batch)] if len(part.entries) else []
        for part in split_batch(batch, many * workers, whole_groups=whole_groups)
    ]
    passes = [parts[first : first + workers] for first in range(0, len(parts), workers)]
    return [even(one) for one in passes if any(one)]


def row_in(entries: np.ndarray, row: Row) -> Row:
    """A row of a part, with its entries numbered as in the whole batch."""
    return Row(row.ids_L, entries[row.entries_R], row.sources_R, row.temperature)


def even(parts: Pass) -> Pass:
    most = max(map(len, parts))
    return [[*rows, *[EMPTY] * (most - len(rows))] for rows in parts]


def rows_of(batch: PackedBatch) -> Iterator[Row]:
    """Each entry in one row."""
    segment_E = _target_segments(batch)
    ends_S = np.append(batch.starts_S[1:], len(batch.ids_N))
    waiting = np.ones(len(segment_E), dtype=np.bool_)
    parents = set(batch.parents_S.tolist())
    for leaf in (s for s in range(len(ends_S)) if s not in parents):
        path = [leaf]
        while batch.parents_S[path[-1]] >= 0:
            path.append(int(batch.parents_S[path[-1]]))
        mine = waiting & np.isin(segment_E, path)
        waiting &= ~mine
        ids_L = np.concatenate([batch.ids_N[batch.starts_S[s] : ends_S[s]] for s in reversed(path)])
        for temperature in np.unique(batch.temperature_E[mine]):
            entries_R = np.flatnonzero(mine & (batch.temperature_E == temperature))
            sources_R = batch.positions_N[batch.source_E[entries_R]].astype(np.int64)
            yield Row(ids_L[: sources_R.max() + 2], entries_R, sources_R, float(temperature))


def _target_segments(batch: PackedBatch) -> np.ndarray:
    """The segment that each entry's target is in: its source's, or at the end of that the child that begins with it."""
    ends_S = np.append(batch.starts_S[1:], len(batch.ids_N))
    segment_E = np.searchsorted(batch.starts_S, batch.source_E, side="right") - 1
    firsts = batch.ids_N[batch.starts_S].tolist()
    child = {pair: s for s, pair in enumerate(zip(batch.parents_S.tolist(), firsts, strict=True))}
    for entry in np.flatnonzero(batch.source_E == ends_S[segment_E] - 1):
        segment_E[entry] = child[int(segment_E[entry]), int(batch.targets_E[entry])]
    return segment_E
