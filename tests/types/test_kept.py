"""Kept tokens of a run: in one array and out of it again."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from agentlightning.types.arrays import fits_kept, int32_bytes, joined_kept, kept_array, kept_table

SETS = st.lists(st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True), max_size=5)


def array(sets: list[list[int] | None]) -> np.ndarray | None:
    return kept_array([None if one is None else np.array(one, np.int32) for one in sets])


@given(st.lists(SETS, min_size=1, max_size=4))
def test_parts_put_together_are_the_whole(parts: list[list[list[int] | None]]) -> None:
    whole = [one for part in parts for one in part]
    joined = joined_kept([(array(part), len(part)) for part in parts])
    table = kept_table(joined, len(whole))
    assert [[int(t) for t in row if t >= 0] or None for row in table] == whole
    alone = array(whole)
    assert (joined is None) == (alone is None)
    if joined is not None and alone is not None:
        assert joined.tolist() == alone.tolist()
        assert fits_kept(int32_bytes(joined), len(whole))


def test_an_array_of_other_tokens_does_not_fit() -> None:
    data = int32_bytes([2, 0, 5, 6])
    assert fits_kept(data, 2)
    assert not fits_kept(data, 1)
    assert not fits_kept(data, 3)
    assert not fits_kept(data[:-1], 2)
    assert not fits_kept(int32_bytes([-1, 3, 5, 6]), 2)
