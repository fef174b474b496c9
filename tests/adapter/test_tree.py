"""Token trees: every token of every sequence is found again, every shared prefix is stored once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from agentlightning.adapter.tree import build_tree

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)


@given(sequences)
def test_every_prefix_is_stored_once_and_found_again(lists: list[list[int]]) -> None:
    given_sequences = [np.array(s, dtype=np.int32) for s in lists]
    tree = build_tree(given_sequences)
    for number, sequence in enumerate(given_sequences):
        depths = np.arange(len(sequence), dtype=np.int32)
        at = tree.locate(number, depths)
        assert tree.ids_N[at].tolist() == sequence.tolist()
        assert tree.positions_N[at].tolist() == depths.tolist()
    prefixes = {tuple(s[: n + 1]) for s in lists for n in range(len(s))}
    assert len(tree.ids_N) == len(prefixes)


@given(sequences)
def test_parents_come_before_their_children(lists: list[list[int]]) -> None:
    tree = build_tree([np.array(s, dtype=np.int32) for s in lists])
    for segment, parent in enumerate(tree.parents_S.tolist()):
        assert parent < segment
        if parent >= 0:
            last_of_parent = tree.starts_S[parent + 1] - 1
            assert tree.positions_N[tree.starts_S[segment]] == tree.positions_N[last_of_parent] + 1


def test_turns_of_a_long_rollout_cost_their_unique_tokens() -> None:
    history = np.random.default_rng(0).integers(0, 1000, 32_000).astype(np.int32)
    tree = build_tree([history[: 640 * (turn + 1)] for turn in range(50)])
    assert len(tree.ids_N) == 32_000
    assert len(tree.starts_S) == 50


def test_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        build_tree([])
