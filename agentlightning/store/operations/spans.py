"""Spans: storing them under their attempt, numbered inside the insert, and making them from rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import bindparam, update

from agentlightning.errors import StoreError
from agentlightning.keys import redacted
from agentlightning.store.database.schema import spans
from agentlightning.store.database.transaction import Row, Statement, Transaction
from agentlightning.store.operations import attempts, rewards
from agentlightning.store.operations.codec import decode, encode_seen, readable
from agentlightning.store.operations.sharing import SharedRows, missing_source
from agentlightning.types import Span
from agentlightning.types.call import SpanSource
from agentlightning.types.span import OtelResource
from agentlightning.types.status import FINISHED_ATTEMPT

SPAN_FIELDS = (
    "rollout_id",
    "attempt_id",
    "span_id",
    "sequence_id",
    "trace_id",
    "parent_id",
    "name",
    "start_time",
    "end_time",
    "attributes",
    "rest",
)
_SHARING_FIELDS = ("texts", "source_attempt", "source_span")
SPAN_COLUMNS = [spans.c[name] for name in (*SPAN_FIELDS, *_SHARING_FIELDS)]
"""What `whole` makes rows of `SPAN_FIELDS` from."""
TEXTS = ("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.tool.definitions")
"""The attributes of a call's span that are stored once for all forks."""
_EMPTY_RESOURCE = OtelResource()
MAX_SEQUENCE = 2**31 - 2
"""The largest sequence number. An attempt that has used it up gives it to all later spans; rows keep their order."""

_insert = Statement(
    lambda insert: insert(spans).on_conflict_do_nothing(index_elements=["rollout_id", "attempt_id", "span_id"]),
    (*SPAN_FIELDS, *_SHARING_FIELDS),
)
_ALONE: dict[str, Any] = dict.fromkeys(_SHARING_FIELDS)
_renumber = Statement(
    update(spans).where(
        spans.c.rollout_id == bindparam("rollout"),
        spans.c.attempt_id == bindparam("attempt"),
        spans.c.span_id == bindparam("span"),
    ),
    ["sequence_id"],
)


def _texts_of(row: Row) -> Row:
    """The texts of a span, from its attributes and, where it has them apart, its texts."""
    attributes, texts = row
    if texts is not None:
        return (texts,)
    try:
        found = msgspec.json.decode(attributes, type=dict[str, Any])
    except (msgspec.DecodeError, TypeError, RecursionError):  # damaged: nothing is equal to it
        return (None,)
    return (encode_seen({name: found[name] for name in TEXTS if name in found}),)


shared_texts = SharedRows(
    spans, own="span_id", source="source_span", shared=["texts"], original=["attributes", "texts"], read=_texts_of
)
"""The texts of spans."""


def to_values(span: Span, source: SpanSource | None = None) -> dict[str, Any]:
    """The columns of a span; its sequence_id may still be 0. Raises `StoreError` for one that is out of bounds.

    source: a span that may have the same texts, which are kept apart then.

    Attempts' keys in its texts are shortened, whichever process it comes from: they are in the URLs of its requests.
    """
    if not 0 <= span.sequence_id <= MAX_SEQUENCE:
        raise StoreError(
            f"The sequence_id of span '{span.name:.80}' is {span.sequence_id}; it can be 1 to {MAX_SEQUENCE}, or 0 for "
            "the next number."
        )
    attributes, apart = span.attributes, {}
    texts = {} if source is None else {name: attributes[name] for name in TEXTS if name in attributes}
    if source is not None and texts:
        attributes = {name: value for name, value in attributes.items() if name not in texts}
        given = encode_seen(texts), source.attempt_id, source.span_id
        apart = dict(zip(_SHARING_FIELDS, given, strict=True))
    return {
        "rollout_id": span.rollout_id,
        "attempt_id": span.attempt_id,
        "span_id": span.span_id,
        "sequence_id": span.sequence_id,
        "trace_id": span.trace_id,
        "parent_id": span.parent_id,
        "name": readable(span.name),
        "start_time": span.start_time,
        "end_time": span.end_time,
        "attributes": encode_seen(attributes),
        "rest": _encode_rest(span),
        **apart,
    }


def _without_shared(tx: Transaction, values: dict[str, Any]) -> dict[str, Any]:
    """The columns of a new span, without the texts that the store has for its source."""
    texts, attempt, span = (values.get(name) for name in _SHARING_FIELDS)
    if attempt is None or span is None:
        return values
    source, own = shared_texts.without_shared(tx, (attempt, span), (texts,))
    return {**values, **dict(zip(_SHARING_FIELDS, (own[0], *(source or (None, None))), strict=True))}


def whole(tx: Transaction, rows: Sequence[Row]) -> list[Row]:
    """Rows of `SPAN_FIELDS` with all their attributes, from rows of `SPAN_COLUMNS`."""
    size = len(SPAN_FIELDS)
    sources = {n: (row[size + 1], row[size + 2]) for n, row in enumerate(rows) if _is_reference(row)}
    held = shared_texts.all_held(tx, list(dict.fromkeys(sources.values())))
    found: list[Row] = []
    for n, row in enumerate(rows):
        texts = row[size]
        if n in sources:
            (texts,) = held.get(sources[n], (None,))
            if texts is None:
                raise missing_source(f"Span '{row[2]}' has its texts from span", sources[n])
        found.append(tuple(row[:size]) if texts is None else _with_texts(row[:size], texts))
    return found


def _is_reference(row: Row) -> bool:
    texts, attempt, _ = row[len(SPAN_FIELDS) :]
    return texts is None and attempt is not None


def _with_texts(row: Row, texts: str) -> Row:
    """A row of `SPAN_FIELDS` with more attributes, as JSON text; what is damaged stays so."""
    *before, attributes, rest = row
    more = str(texts)[1:]
    return (*before, f"{{{more}" if attributes == "{}" else f"{str(attributes)[:-1]},{more}", rest)


def _encode_rest(span: Span) -> str | None:
    """What most spans leave at its default, without the defaults."""
    rest: dict[str, Any] = {}
    if span.status.description is not None:
        rest["status"] = [span.status.status_code, span.status.description]
    elif span.status.status_code != "UNSET":
        rest["status"] = [span.status.status_code]
    if span.events:
        rest["events"] = [event.model_dump() for event in span.events]
    if span.links:
        rest["links"] = [link.model_dump() for link in span.links]
    if span.context is not None:
        rest["context"] = span.context.model_dump()
    if span.parent is not None:
        rest["parent"] = span.parent.model_dump()
    if span.resource != _EMPTY_RESOURCE:
        rest["resource"] = span.resource.model_dump()
    return encode_seen(rest) if rest else None


def to_span(row: Sequence[Any]) -> Span:
    """A `Span` from a row of `SPAN_FIELDS`."""
    values = dict(zip(SPAN_FIELDS, row, strict=True))
    values["name"] = redacted(values["name"])
    values["attributes"] = decode(values["attributes"], "spans.attributes", values["span_id"], type=dict[str, Any])
    rest = values.pop("rest")
    if rest is not None:
        values |= decode(rest, "spans.rest", values["span_id"], type=dict[str, Any])
        if "status" in values:
            values["status"] = dict(zip(("status_code", "description"), values["status"], strict=False))
    return Span.model_validate(values)


def add(tx: Transaction, values: Sequence[dict[str, Any]]) -> list[int]:
    """Store spans given as columns; returns the sequence number of each, or 0 for one that was there already.

    They take as many statements as those of one attempt, however many it are: others wait for what is locked.
    """
    states = attempts.load_many(tx, dict.fromkeys((value["rollout_id"], value["attempt_id"]) for value in values))
    first = {attempt_id: min(attempt.next_span, MAX_SEQUENCE) for attempt_id, (attempt, _) in states.items()}
    guessed, following = _numbered(values, first, [1] * len(values))
    rows = [{**_ALONE, **value, "sequence_id": number} for value, number in zip(values, guessed, strict=True)]
    stored = tx.each(_insert, rows)
    numbers, following = _numbered(values, first, stored)
    new = [{**row, "sequence_id": number} for row, number in zip(rows, numbers, strict=True) if number]
    if 0 in stored:  # those after one that was there already have a number too high
        tx.many(_renumber, [_place(row) for row in new])
    tx.changes.counts["spans"] += len(new)
    signs = [attempts.Sign(*both, running=True, next_span=following[one]) for one, both in states.items()]
    attempts.keep_alive(tx, signs)
    for attempt_id, (attempt, rollout) in states.items():
        if attempt.status in FINISHED_ATTEMPT:
            late = [value for value in new if value["attempt_id"] == attempt_id]
            rewards.note_late(tx, attempt_id, rollout.rollout_id, late)
    return numbers


def add_of_calls(tx: Transaction, values: Sequence[dict[str, Any]]) -> None:
    """Store spans of calls. Those of forks come one attempt after another, so that each finds what others hold."""
    of_attempt: dict[str, list[dict[str, Any]]] = {}
    for value in values:
        of_attempt.setdefault(value["attempt_id"], []).append(value)
    forks = {name for name, rows in of_attempt.items() if any(row.get("source_attempt") is not None for row in rows)}
    others = [value for value in values if value["attempt_id"] not in forks]
    if others:
        add(tx, others)
    for name in sorted(forks):
        add(tx, [_without_shared(tx, row) for row in of_attempt[name]])


def _numbered(
    values: Sequence[dict[str, Any]], first: Mapping[str, int], stored: Sequence[int]
) -> tuple[list[int], dict[str, int]]:
    """The numbers of those that are stored, 0 for the others, and the next ones of their attempts."""
    numbers, following = [0] * len(values), dict(first)
    for place, value in enumerate(values):
        attempt_id = value["attempt_id"]
        if stored[place]:
            number = numbers[place] = value["sequence_id"] or following[attempt_id]
            following[attempt_id] = min(max(following[attempt_id], number + 1), MAX_SEQUENCE)
    return numbers, following


def _place(row: dict[str, Any]) -> dict[str, Any]:
    where = {"rollout": row["rollout_id"], "attempt": row["attempt_id"], "span": row["span_id"]}
    return {**where, "sequence_id": row["sequence_id"]}


def next_sequence_id(tx: Transaction, rollout_id: str, attempt_id: str) -> int:
    """Reserve a sequence number."""
    attempt, rollout = attempts.load(tx, rollout_id, attempt_id)
    number = min(attempt.next_span, MAX_SEQUENCE)
    sign = attempts.Sign(attempt, rollout, running=False, next_span=min(number + 1, MAX_SEQUENCE))
    attempts.keep_alive(tx, [sign])
    return number
