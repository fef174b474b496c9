"""Calls: model calls with their token segments, written once per unique token and read back as whole arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from sqlalchemy import bindparam, func, select

from agentlightning.errors import ConflictError, StoreError
from agentlightning.store.database.schema import calls, rollouts, segments
from agentlightning.store.database.transaction import IDS_PER_QUERY, Statement, Transaction
from agentlightning.store.operations import spans
from agentlightning.store.operations.codec import decode, encode, of_row
from agentlightning.store.operations.segments import TOKEN_BYTES, SegmentRow, SegmentTree
from agentlightning.store.operations.sharing import RowSource, SharedRows, missing_source
from agentlightning.types import Call, CallInfo, CallRecord, Segment
from agentlightning.types.arrays import Float32Array, fits_kept, float32_bytes, int32_bytes

_SEGMENT_FIELDS = ("attempt_id", *SegmentRow._fields, "source_attempt", "source_segment")
_TOKENS = ("ids", "logprobs", "plain_logprobs")
shared_tokens = SharedRows(segments, own="segment_id", source="source_segment", shared=_TOKENS)
"""The tokens of segments."""


class CallRow(NamedTuple):
    """A call as it is stored: `info` is JSON."""

    rollout_id: str
    attempt_id: str
    call_id: str
    prompt_segment_id: str
    response_segment_id: str
    info: str


_insert_segment = Statement(
    lambda insert: insert(segments).on_conflict_do_nothing(index_elements=["attempt_id", "segment_id"]),
    _SEGMENT_FIELDS,
)
_insert_call = Statement(
    lambda insert: insert(calls).on_conflict_do_nothing(index_elements=["rollout_id", "attempt_id", "call_id"]),
    CallRow._fields,
)
_length = Statement(
    select(func.length(segments.c.ids), segments.c.source_attempt, segments.c.source_segment).where(
        segments.c.attempt_id == bindparam("attempt"), segments.c.segment_id == bindparam("segment")
    )
)


class CallRows(NamedTuple):
    """A call record as columns, made before the transaction so that the writer only writes."""

    call: dict[str, Any]
    segments: list[dict[str, Any]]
    span: dict[str, Any]
    needs: dict[str, int]
    """Segments that must be stored already, each with the number of tokens it must have at least."""


def to_rows(record: CallRecord) -> CallRows:
    info = record.info
    return CallRows(
        call={
            "rollout_id": info.rollout_id,
            "attempt_id": info.attempt_id,
            "call_id": info.call_id,
            "prompt_segment_id": record.prompt_segment_id,
            "response_segment_id": record.response_segment_id,
            "info": encode(info),
        },
        segments=[_segment_values(info.attempt_id, segment) for segment in record.segments],
        span=spans.to_values(record.span, record.span_source),
        needs=_needs(record),
    )


def _needs(record: CallRecord) -> dict[str, int]:
    lengths: dict[str, int] = {}
    needs: dict[str, int] = {}
    for segment in record.segments:
        parent = segment.parent_id
        if parent is None and segment.parent_keep:
            raise StoreError(f"Segment '{segment.segment_id}' keeps {segment.parent_keep} tokens but has no parent.")
        if parent in lengths and segment.parent_keep > lengths[parent]:
            raise StoreError(
                f"Segment '{segment.segment_id}' keeps {segment.parent_keep} tokens of segment '{parent}', which has "
                f"only {lengths[parent]}."
            )
        if parent is not None and parent not in lengths:
            needs[parent] = max(needs.get(parent, 0), segment.parent_keep)
        lengths[segment.segment_id] = len(segment.ids)
    for named in (record.prompt_segment_id, record.response_segment_id):
        if named not in lengths:
            needs.setdefault(named, 0)
    return needs


def _segment_values(attempt_id: str, segment: Segment) -> dict[str, Any]:
    for name, array in (("logprobs", segment.logprobs), ("plain_logprobs", segment.plain_logprobs)):
        if array is not None and len(array) != len(segment.ids):
            raise StoreError(
                f"Segment '{segment.segment_id}' has {len(segment.ids)} ids but {len(array)} {name}; they go in pairs."
            )
    kept = None if segment.kept is None else int32_bytes(segment.kept)
    if kept is not None and not fits_kept(kept, len(segment.ids)):
        raise StoreError(f"Segment '{segment.segment_id}' has kept tokens of other tokens than its own.")
    return {
        "attempt_id": attempt_id,
        "segment_id": segment.segment_id,
        "parent_id": segment.parent_id,
        "parent_keep": segment.parent_keep,
        "ids": int32_bytes(segment.ids),
        "logprobs": _floats(segment.logprobs),
        "plain_logprobs": _floats(segment.plain_logprobs),
        "versions": encode([[run.start, run.version] for run in segment.versions]) if segment.versions else None,
        "kept": kept,
        "source_attempt": None if segment.source is None else segment.source.attempt_id,
        "source_segment": None if segment.source is None else segment.source.segment_id,
    }


def _floats(array: Float32Array | None) -> bytes | None:
    return None if array is None else float32_bytes(array)


def add(tx: Transaction, rows: Sequence[CallRows]) -> None:
    """Store calls, in an order in which a segment's parent comes before it."""
    for attempt_id, group in groupby(rows, key=lambda row: row.call["attempt_id"]):
        batch = list(group)
        _check_needs(tx, attempt_id, batch)
        tx.many(_insert_segment, [_without_shared(tx, one) for row in batch for one in row.segments])
        tx.changes.counts["calls"] += tx.many(_insert_call, [row.call for row in batch])
    spans.add_of_calls(tx, [row.span for row in rows])


def _without_shared(tx: Transaction, values: dict[str, Any]) -> dict[str, Any]:
    """The columns of a new segment, without the tokens that the store has for its source."""
    if values["source_attempt"] is None:
        return values
    source: RowSource | None = values["source_attempt"], values["source_segment"]
    own = tuple(values[name] for name in _TOKENS)
    source, own = shared_tokens.without_shared(tx, source, own) if values["ids"] else (None, own)
    attempt, segment = source or (None, None)
    return {**values, **dict(zip(_TOKENS, own, strict=True)), "source_attempt": attempt, "source_segment": segment}


def _length_of(tx: Transaction, attempt_id: str, segment_id: str) -> int | None:
    """How many tokens a stored segment has of its own; None if it is not there."""
    row = tx.row(_length, {"attempt": attempt_id, "segment": segment_id})
    if row is None:
        return None
    length, attempt, segment = row
    if not length and attempt is not None:
        held = shared_tokens.held(tx, (attempt, segment))
        length = 0 if held is None else len(held[0])
    return length // TOKEN_BYTES


def _check_needs(tx: Transaction, attempt_id: str, rows: Sequence[CallRows]) -> None:
    new: dict[str, int] = {}
    for row in rows:
        for segment_id, keep in row.needs.items():
            length = new.get(segment_id)
            if length is None:
                length = _length_of(tx, attempt_id, segment_id)
            if length is None or keep > length:
                raise ConflictError(
                    f"Call '{row.call['call_id']}' builds on {keep} tokens of segment '{segment_id}', of which attempt "
                    f"'{attempt_id}' has {length or 0}. Store the calls of an attempt in the order they were made."
                )
        new.update((segment["segment_id"], len(segment["ids"]) // TOKEN_BYTES) for segment in row.segments)


class CallTable(NamedTuple):
    """The calls of some rollouts as they are stored: this is what goes over a wire."""

    calls: list[CallRow]
    segments: dict[str, list[SegmentRow]]
    """By attempt_id."""


def fetch(tx: Transaction, rollout_ids: Sequence[str], latest_attempt_only: bool) -> CallTable:
    """The calls of many rollouts in the order they were stored, in two queries, or four if some are forks."""
    ids = list(dict.fromkeys(rollout_ids))
    found: list[CallRow] = []
    for start in range(0, len(ids), IDS_PER_QUERY):
        found += _fetch_calls(tx, ids[start : start + IDS_PER_QUERY], latest_attempt_only)
    return CallTable(found, fetch_segments(tx, list(dict.fromkeys(row.attempt_id for row in found))))


def fetch_segments(tx: Transaction, attempt_ids: Sequence[str]) -> dict[str, list[SegmentRow]]:
    """The segments of attempts with all their tokens, by attempt, in the order in which they were stored."""
    s = segments.c
    columns = [s.seq, s.attempt_id, s.source_attempt, s.source_segment, *[s[name] for name in SegmentRow._fields]]
    found: list[tuple[int, str, RowSource | None, SegmentRow]] = []
    for start in range(0, len(attempt_ids), IDS_PER_QUERY):
        chosen = s.attempt_id.in_(attempt_ids[start : start + IDS_PER_QUERY])
        for seq, attempt_id, attempt, segment, *values in tx.select(select(*columns).where(chosen)):
            row = SegmentRow._make(values)
            found.append((seq, attempt_id, (attempt, segment) if attempt is not None and not row.ids else None, row))
    sources = dict.fromkeys(source for _, _, source, _ in found if source is not None)
    held = shared_tokens.all_held(tx, list(sources))
    by_attempt: dict[str, list[SegmentRow]] = {attempt_id: [] for attempt_id in attempt_ids}
    for _, attempt_id, source, row in sorted(found, key=lambda one: one[0]):
        if source is not None and source not in held:
            raise missing_source(f"Segment '{row.segment_id}' has its tokens from segment", source)
        tokens = {} if source is None else dict(zip(_TOKENS, held[source], strict=True))
        of_row(by_attempt, attempt_id, "a segment").append(row._replace(**tokens))
    return by_attempt


def _fetch_calls(tx: Transaction, rollout_ids: Sequence[str], latest_attempt_only: bool) -> list[CallRow]:
    columns = [calls.c[name] for name in CallRow._fields]
    statement = select(*columns).where(calls.c.rollout_id.in_(rollout_ids)).order_by(calls.c.seq)
    if latest_attempt_only:
        statement = statement.join(rollouts, rollouts.c.rollout_id == calls.c.rollout_id).where(
            calls.c.attempt_id == rollouts.c.latest_attempt_id
        )
    return [CallRow._make(row) for row in tx.select(statement)]


def assemble(table: CallTable, rollout_ids: Sequence[str]) -> dict[str, Sequence[Call]]:
    """Calls by rollout, with whole arrays. A rollout without calls has an empty list."""
    found: dict[str, list[Call]] = {rollout_id: [] for rollout_id in rollout_ids}
    trees = {attempt_id: SegmentTree(rows) for attempt_id, rows in table.segments.items()}
    for row in table.calls:
        tree = of_row(trees, row.attempt_id, "a call")
        of_row(found, row.rollout_id, "a call").append(_to_call(row, tree))
    return dict(found)


def _to_call(row: CallRow, tree: SegmentTree) -> Call:
    ids, logprobs, plain_logprobs, versions, kept = tree.response(row.prompt_segment_id, row.response_segment_id)
    return Call(
        info=decode(row.info, "calls.info", row.rollout_id, type=CallInfo),
        prompt_ids=tree.path(row.prompt_segment_id),
        response_ids=ids,
        logprobs=logprobs,
        plain_logprobs=plain_logprobs,
        versions=versions,
        kept=kept,
        prompt_segment_id=row.prompt_segment_id,
        response_segment_id=row.response_segment_id,
    )
