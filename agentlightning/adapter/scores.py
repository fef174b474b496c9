"""Scores that other tools gave to traces and to what is in them → scores of conversations. Pure.

They choose and describe conversations to fine-tune on. They are no rewards: nothing here is used for reinforcement
learning.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SCORES, COMMENTS = "scores", "score_comments"
"""The fields of a conversation that hold its scores by name, and what was said of them."""
EVALUATION = "gen_ai.evaluation.result"
"""The event of OpenTelemetry's GenAI conventions that holds a score."""
_DEEPEST = 1000
"""Things above one another in a trace."""
_BOOLEANS = {"true": 1, "false": 0}


@dataclass(frozen=True, slots=True)
class ImportedScore:
    """A score as a trace has it."""

    name: str
    value: float | str
    trace: str
    observation: str | None = None
    """The id of what it is of: a model call, or something that contains or judges some; None is the whole trace."""
    comment: str = ""


def langfuse_score(score: Mapping[str, Any], trace: Any = None, observation: Any = None) -> ImportedScore | None:
    """A score of Langfuse, of this trace and observation where it names none itself. None for a correction, for one of
    a session, and for one without a value."""
    subject = score.get("subject") or {}
    kind, ident = subject.get("kind"), subject.get("id")
    where = score.get("traceId") or subject.get("traceId") or (ident if kind == "trace" else None)
    what = score.get("observationId") or (ident if kind == "observation" else None)
    if kind is None and score.get("sessionId") is None:
        where, what = where or trace, what or observation
    value = _value(score)
    if value is None or where is None or not score.get("name"):
        return None
    return ImportedScore(str(score["name"]), value, str(where), what and str(what), str(score.get("comment") or ""))


def langfuse_scores(given: Any, trace: Any, observation: Any = None) -> Iterator[ImportedScore | None]:
    """The scores that an object of Langfuse holds: a list of them, or an object of values by name."""
    if isinstance(given, Mapping):
        several = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
        given = [{"name": name, "value": value} for name, values in several.items() for value in values]
    for score in given or ():
        yield langfuse_score(score, trace, observation)


def evaluations(events: Iterable[tuple[str, Mapping[str, Any]]], trace: str, span: str) -> Iterator[ImportedScore]:
    """The scores in the events of a span."""
    for name, attributes in events:
        value = _number(attributes.get("gen_ai.evaluation.score.value"))
        found = attributes.get("gen_ai.evaluation.score.label") if value is None else value
        called = attributes.get("gen_ai.evaluation.name")
        if name == EVALUATION and called and found is not None:
            comment = str(attributes.get("gen_ai.evaluation.explanation") or "")
            yield ImportedScore(
                str(called), found if isinstance(found, int | float) else str(found), trace, span, comment
            )


def _value(score: Mapping[str, Any]) -> float | str | None:
    """The number of a score, a text of one that has categories; 1 and 0 of one that is true or false."""
    kind, value = score.get("dataType"), score.get("value")
    text = score.get("stringValue", value if isinstance(value, str) else None)
    if kind == "CORRECTION":
        return None
    if kind in ("CATEGORICAL", "TEXT"):
        return str(text) if text is not None else _number(value)
    number = _number(value)
    if number is not None or text is None:
        return number
    return _BOOLEANS.get(str(text).lower(), str(text)) if kind in ("BOOLEAN", None) else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def scored_calls(
    score: ImportedScore, calls: Collection[str], parents: Mapping[str, str], below: Mapping[str, set[str]]
) -> set[str]:
    """Which calls of a trace a score is of: the one that it names, or those below what it names; where there are none,
    those of the nearest thing above. None where it names something that is not in the trace.

    Args:
        score: The score.
        calls: The ids of all calls of the trace.
        parents: What each call and each other thing of the trace is below, by their ids.
        below: As `calls_below_each` makes it.
    """
    if score.observation is None:
        return set(calls)
    return next((below[place] for place in _upwards(score.observation, parents) if place in below), set())


def calls_below_each(calls: Iterable[str], parents: Mapping[str, str]) -> dict[str, set[str]]:
    """The calls that are each thing of a trace or below it, by its id."""
    found: dict[str, set[str]] = {}
    for call in calls:
        for place in _upwards(call, parents):
            found.setdefault(place, set()).add(call)
    return found


def _upwards(ident: str, parents: Mapping[str, str]) -> Iterable[str]:
    """An id and those above it, as far as traces are nested."""
    found = {ident: None}
    above = parents.get(ident)
    while above is not None and above not in found and len(found) < _DEEPEST:
        found[above] = None
        above = parents.get(above)
    return found


def score_fields(scores: Sequence[ImportedScore]) -> dict[str, Any]:
    """The fields of a conversation with these scores; none where there are none. Of several numbers by one name the
    lowest counts, so that none of them is hidden by a better one; of several texts the last."""
    values: dict[str, float | str] = {}
    comments: dict[str, str] = {}
    for score in scores:
        known = values.get(score.name)
        if isinstance(known, int | float) and (isinstance(score.value, str) or known <= score.value):
            continue
        values[score.name] = score.value
        comments.pop(score.name, None)
        if score.comment:
            comments[score.name] = score.comment
    return {**({SCORES: values} if values else {}), **({COMMENTS: comments} if comments else {})}
