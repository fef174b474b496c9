"""The segments of one attempt, put together into whole arrays. No SQL here.

One array is made per longest path; the shorter paths it covers are views of it, so memory grows with unique tokens here
too. All arrays are read-only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from agentlightning.errors import StoreError
from agentlightning.types import VersionRun
from agentlightning.types.arrays import Float32Array, Int32Array, float32_array, int32_array, int32_bytes, kept_bytes

TOKEN_BYTES = 4
_UNKNOWN = struct.pack("<f", float("nan"))
Response = tuple[Int32Array, Float32Array, Float32Array, tuple[VersionRun, ...], Int32Array | None]


class SegmentRow(NamedTuple):
    """A segment as it is stored: arrays as bytes, versions as JSON."""

    segment_id: str
    parent_id: str | None
    parent_keep: int
    ids: bytes
    logprobs: bytes | None
    plain_logprobs: bytes | None
    versions: str | None
    kept: bytes | None = None

    @property
    def length(self) -> int:
        return len(self.ids) // TOKEN_BYTES


class SegmentTree:
    """Whole paths of the segments of one attempt."""

    def __init__(self, rows: Iterable[SegmentRow]):
        self._rows = {row.segment_id: row for row in rows}
        self._paths: dict[str, Int32Array] = {}
        self._starts: dict[str, int] = {}
        """How many tokens come before a segment's own."""
        for segment_id in self._rows:
            self._measure(segment_id)
        ends = {segment_id: self._starts[segment_id] + row.length for segment_id, row in self._rows.items()}
        for segment_id in sorted(ends, key=ends.__getitem__, reverse=True):
            if segment_id not in self._paths:
                self._assemble(segment_id, ends[segment_id])

    def path(self, segment_id: str) -> Int32Array:
        """The ids from the root to the end of a segment."""
        return self._paths[self._row(segment_id).segment_id]

    def response(self, prompt_id: str, response_id: str) -> Response:
        """What follows the prompt: ids, log-probs, plain log-probs (NaN where unknown), version runs, kept tokens."""
        chain: list[SegmentRow] = []
        current: str | None = response_id
        while current != prompt_id:
            if current is None:
                raise StoreError(f"Segment '{response_id}' does not continue segment '{prompt_id}'.")
            chain.append(self._row(current))
            current = chain[-1].parent_id
        chain.reverse()
        if len(chain) == 1:
            (row,) = chain
            logprobs, plain_logprobs = _floats(row, row.logprobs), _floats(row, row.plain_logprobs)
            kept = None if row.kept is None else int32_array(row.kept)
            return int32_array(row.ids), float32_array(logprobs), float32_array(plain_logprobs), _runs(row), kept
        runs: list[VersionRun] = []
        start = 0
        for row in chain:
            runs.extend(VersionRun(start + run.start, run.version) for run in _runs(row))
            start += row.length
        kept = kept_bytes((row.kept, row.length) for row in chain)
        return (
            int32_array(b"".join(row.ids for row in chain)),
            float32_array(b"".join(_floats(row, row.logprobs) for row in chain)),
            float32_array(b"".join(_floats(row, row.plain_logprobs) for row in chain)),
            tuple(runs),
            None if kept is None else int32_array(kept),
        )

    def _row(self, segment_id: str) -> SegmentRow:
        row = self._rows.get(segment_id)
        if row is None:
            raise StoreError(
                f"Segment '{segment_id}' is missing in the store, so the calls that build on it cannot be read. "
                "Something else than the store has changed the database."
            )
        return row

    def _measure(self, segment_id: str) -> None:
        """Starts of a segment and its ancestors; no recursion, as a path may be thousands of turns long."""
        chain: list[SegmentRow] = []
        current: str | None = segment_id
        while current is not None and current not in self._starts:
            chain.append(self._row(current))
            current = chain[-1].parent_id
            if len(chain) > len(self._rows):
                raise _damaged(chain[-1], "it continues itself")
        for row in reversed(chain):
            above = None if row.parent_id is None else self._rows[row.parent_id]
            _check(row, above)
            self._starts[row.segment_id] = 0 if above is None else self._starts[above.segment_id] + row.parent_keep

    def _assemble(self, segment_id: str, end: int) -> None:
        """One array for a segment's path; every ancestor that is wholly on it becomes a view."""
        whole = memoryview(bytearray(end * TOKEN_BYTES))
        path = int32_array(whole.toreadonly())
        current: str | None = segment_id
        while current is not None:
            row = self._rows[current]
            start = self._starts[current]
            if current in self._paths:
                whole[: end * TOKEN_BYTES] = int32_bytes(self._paths[current][:end])
                break
            whole[start * TOKEN_BYTES : end * TOKEN_BYTES] = row.ids[: (end - start) * TOKEN_BYTES]
            if end - start == row.length:
                self._paths[current] = path[:end]
            end, current = start, row.parent_id


def _check(row: SegmentRow, above: SegmentRow | None) -> None:
    """Raises StoreError for a segment that cannot follow the one above it, or whose numbers are not those of tokens."""
    if above is not None and not 0 <= row.parent_keep <= above.length:
        raise _damaged(row, f"it keeps {row.parent_keep} tokens of {above.length}")
    for data, size in ((row.ids, None), (row.logprobs, row.length), (row.plain_logprobs, row.length), (row.kept, None)):
        if data is not None and (len(data) % TOKEN_BYTES or size not in (None, len(data) // TOKEN_BYTES)):
            raise _damaged(row, f"{len(data)} bytes are no numbers of {row.length} tokens")


def _damaged(row: SegmentRow, why: str) -> StoreError:
    return StoreError(
        f"Segment '{row.segment_id}' is damaged in the store: {why}. Keep a copy of the store, and repair it."
    )


def _floats(row: SegmentRow, data: bytes | None) -> bytes:
    return _UNKNOWN * row.length if data is None else data


def _runs(row: SegmentRow) -> tuple[VersionRun, ...]:
    if row.versions is None:
        return ()
    try:
        return tuple(VersionRun(*run) for run in msgspec.json.decode(row.versions, type=list[tuple[int, int]]))
    except (msgspec.DecodeError, TypeError, RecursionError) as error:
        raise _damaged(row, f"its versions are no pairs of numbers ({error})") from None
