"""From a request's body to rows of spans: decoded, checked, and allowed by the key that it came with.

Pure, because it is done where a body's size asks for: a short one is read in the server, any other in `reader`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError

from agentlightning.errors import StoreError
from agentlightning.store.http import otlp, size
from agentlightning.store.operations.spans import SPAN_FIELDS, to_values
from agentlightning.types import Span
from agentlightning.types.names import CALL_ID, PARENT_CALL_ID, TRIPLET, TRIPLET_JSON
from agentlightning.types.reward import reward_error

REWARD_PREFIX = "agentlightning.reward."
SPANS_AT_ONCE = 256
"""Rows of one part."""
BYTES_AT_ONCE = 2**20
"""Of their attributes."""
_SYSTEMS_OWN = (CALL_ID, PARENT_CALL_ID, TRIPLET_JSON)
"""Attributes by which the gateway and the runners say what is trained: never an agent's."""

Row = Sequence[Any]
"""The values of `SPAN_FIELDS`."""


class Owner(msgspec.Struct, frozen=True):
    """Whose key a body came with."""

    rollout_id: str
    attempt_id: str
    rewards: bool
    """Whether it may write rewards."""


class Given(msgspec.Struct, frozen=True):
    """What is known of a body before it is read."""

    is_otlp: bool
    """Or else a list of spans in JSON."""
    is_json: bool
    encoding: str
    owner: Owner | None
    """None: the admin's."""


class Found(msgspec.Struct, frozen=True, tag=True):
    """The parts of a body's rows, and what was left out of them."""

    parts: int
    rejected: int = 0
    why: str = ""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why a body is not taken."""

    status: int
    why: str


class NotAllowed(StoreError):
    """The key does not open what the body asks for."""


def read(given: Given, body: bytes) -> tuple[Found | Refused, list[list[Row]]]:
    """What a body says, and its rows in parts; those of OTLP by attempt. Raises nothing for what a client may send."""
    try:
        found = list(otlp.spans_in(given.is_json, given.encoding, body) if given.is_otlp else _spans_in(given, body))
        if given.owner is not None:
            found = [_rewarded(span, leave_out=given.is_otlp) for span in found]
        spans = [span for span in found if not isinstance(span, str)]
        if given.owner is not None:
            for span in spans:
                _check(given.owner, span)
        parts = list(_parts(spans, by_attempt=given.is_otlp))
    except NotAllowed as error:
        return Refused(403, str(error)), []
    except size.TooMuch as error:
        return Refused(413, str(error)), []
    except StoreError as error:
        return Refused(422, str(error)), []
    reasons = [span for span in found if isinstance(span, str)]
    return Found(len(parts), len(reasons), reasons[0] if reasons else ""), parts


def is_short(given: Given, body: bytes) -> bool:
    """Whether it is read at once."""
    return len(body) <= size.SHORT_BYTES and (not given.is_otlp or otlp.is_short(given.is_json, given.encoding, body))


_span = TypeAdapter(Span)
_raw_spans = msgspec.json.Decoder(list[msgspec.Raw])


def _spans_in(given: Given, body: bytes) -> Iterator[Span]:
    if given.owner is not None:
        size.check_json(body)
    try:
        raw = _raw_spans.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise StoreError(f"The body is not a list of spans: {error}.") from error
    if given.owner is not None and len(raw) > size.MAX_SPANS:
        raise size.too_many("spans", size.MAX_SPANS)
    for number, one in enumerate(raw):
        try:
            yield _span.validate_json(bytes(one))
        except ValidationError as error:
            raise StoreError(f"The request is not valid: span {number}: {_why(error)}") from None


def _why(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[:5]
    return "; ".join(": ".join(filter(None, (".".join(map(str, one["loc"]))[:200], one["msg"]))) for one in first)


def _rewarded(span: Span | str, *, leave_out: bool) -> Span | str:
    """The span, or why it is left out: an invalid reward. Raises StoreError where nothing may be left out."""
    wrong = None if isinstance(span, str) else reward_error(span.name, span.attributes)
    if wrong is not None and not leave_out:
        raise StoreError(wrong)
    return span if wrong is None else wrong


def _check(owner: Owner, span: Span) -> None:
    if (span.rollout_id, span.attempt_id) != (owner.rollout_id, owner.attempt_id):
        raise NotAllowed("This key reports spans of its own attempt only.")
    if span.name == TRIPLET or any(name in span.attributes for name in _SYSTEMS_OWN):
        raise NotAllowed("What is trained is not said by spans of an agent.")
    if not owner.rewards and any(name.startswith(REWARD_PREFIX) for name in span.attributes):
        raise NotAllowed("This key may not write rewards: a grader gives them here.")


def _parts(spans: Sequence[Span], *, by_attempt: bool) -> Iterator[list[Row]]:
    groups: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        groups[(span.rollout_id, span.attempt_id) if by_attempt else ("", "")].append(span)
    for group in groups.values():
        part: list[Row] = []
        weight = 0
        for span in group:
            values = to_values(span)
            part.append([values[name] for name in SPAN_FIELDS])
            weight += len(values["attributes"]) + len(values["rest"] or "")
            if len(part) == SPANS_AT_ONCE or weight >= BYTES_AT_ONCE:
                yield part
                part, weight = [], 0
        if part:
            yield part
