"""Token trees: sequences of tokens → a tree by prefix in which a shared token is stored once. Pure; numpy only.

Every call of every rollout enters as one sequence, its prompt and its response. Turns of a conversation, siblings of a
group and sub-agents share what they have in common, at any depth. Cost: one sort and one comparison of neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from agentlightning.types.arrays import Int32Array, np


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """A forest of segments in depth-first order. N tokens, S segments; parents come before their children."""

    ids_N: Int32Array
    positions_N: Int32Array
    """Depth of each token: 0 for the first token of a sequence."""
    starts_S: Int32Array
    """Where each segment starts in N."""
    parents_S: Int32Array
    """Parent segment, -1 for a root."""
    paths: tuple[tuple[int, ...], ...]
    """For each sequence that was given, its segments from the root."""

    def locate(self, sequence: int, depths: Int32Array) -> Int32Array:
        """Indices into N of the tokens at `depths` of a sequence."""
        segments = np.asarray(self.paths[sequence], dtype=np.int32)
        first = self.starts_S[segments]
        depth_of_first = self.positions_N[first]
        which = np.searchsorted(depth_of_first, depths, side="right") - 1
        return (first[which] + depths - depth_of_first[which]).astype(np.int32)


def build_tree(sequences: Sequence[Int32Array]) -> TokenTree:
    """Arrange non-empty sequences of token ids by prefix. Equal sequences share one path."""
    if not sequences:
        raise ValueError("build_tree needs at least one sequence")
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].astype(">i4").tobytes())
    ordered = [sequences[i] for i in order]
    common = np.array([_common_prefix(a, b) for a, b in pairwise(ordered)], dtype=np.int64)

    pieces: list[tuple[int, int, int]] = []  # sequence to read from, first depth, end depth
    parents: list[int] = []
    paths: list[tuple[int, ...]] = [()] * len(sequences)
    stack: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(ordered), 0, ())]
    while stack:
        low, high, depth, path = stack.pop()
        between = common[low : high - 1]
        end = int(between.min()) if len(between) else len(ordered[low])
        if end > depth:
            parents.append(path[-1] if path else -1)
            path = (*path, len(pieces))
            pieces.append((low, depth, end))
        if not len(between):
            paths[order[low]] = path
            continue
        cuts = [low, *(low + 1 + np.flatnonzero(between == end)).tolist(), high]
        stack.extend((a, b, end, path) for a, b in reversed(list(pairwise(cuts))))

    lengths = np.array([end - start for _, start, end in pieces], dtype=np.int32)
    return TokenTree(
        ids_N=np.concatenate([ordered[i][start:end] for i, start, end in pieces]).astype(np.int32),
        positions_N=np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in pieces]),
        starts_S=(np.cumsum(lengths) - lengths).astype(np.int32),
        parents_S=np.array(parents, dtype=np.int32),
        paths=tuple(paths),
    )


def _common_prefix(a: Int32Array, b: Int32Array) -> int:
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    first = int(different.argmax()) if n else 0
    return first if n and different[first] else n
