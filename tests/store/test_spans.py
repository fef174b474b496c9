"""Spans: what is stored comes back, numbered and once."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider

from agentlightning.errors import NotFoundError, StoreError
from agentlightning.store import LightningStore
from agentlightning.types import AttemptStatus, Event, Link, OtelResource, Span, SpanContext, SpanStatus
from tests.store.builders import make_span


@pytest.mark.contract
async def test_a_span_comes_back_complete(store: LightningStore) -> None:
    claim = await store.start_rollout(1)
    context = SpanContext(trace_id="a" * 32, span_id="b" * 16, is_remote=True, trace_state={"k": "v"})
    span = Span(
        rollout_id=claim.rollout_id,
        attempt_id=claim.attempt.attempt_id,
        sequence_id=7,
        trace_id="a" * 32,
        span_id="b" * 16,
        parent_id="c" * 16,
        name="tool é",
        status=SpanStatus(status_code="ERROR", description="boom"),
        attributes={"list": [1, 2.5, "x"], "none": None, "nested": {"a": [True]}},
        events=[Event(name="e", attributes={"n": 1}, timestamp=3.5)],
        links=[Link(context=context, attributes={"l": 1})],
        start_time=1.25,
        end_time=2.5,
        context=context,
        parent=context,
        resource=OtelResource(attributes={"service.name": "s"}, schema_url="u"),
    )
    assert await store.add_span(span) == span
    assert list(await store.query_spans(claim.rollout_id)) == [span]
    assert await store.add_span(span) is None
    assert (await store.statistics())["total_spans"] == 1


@pytest.mark.contract
async def test_sequence_numbers_are_given_inside_the_insert(store: LightningStore) -> None:
    claim = await store.start_rollout(1)
    await asyncio.gather(*[store.add_span(make_span(claim, str(n))) for n in range(30)])
    numbers = [span.sequence_id for span in await store.query_spans(claim.rollout_id)]
    assert numbers == list(range(1, 31))
    assert await store.get_next_span_sequence_id(claim.rollout_id, claim.attempt.attempt_id) == 31
    stored = await store.add_span(make_span(claim))
    assert stored is not None
    assert stored.sequence_id == 32


@pytest.mark.contract
async def test_repeated_spans_of_a_batch_are_left_out(store: LightningStore) -> None:
    claim = await store.start_rollout(1)
    spans = [make_span(claim, str(n)) for n in range(3)]
    assert [s.name for s in await store.add_many_spans(spans[:2])] == ["0", "1"]
    assert [s.name for s in await store.add_many_spans(spans)] == ["2"]
    assert [s.name for s in await store.query_spans(claim.rollout_id)] == ["0", "1", "2"]


async def test_spans_stay_with_their_attempt(store: LightningStore) -> None:
    first = await store.start_rollout(1)
    await store.add_span(make_span(first, "old"))
    await store.update_attempt(first.rollout_id, "latest", status=AttemptStatus.UNRESPONSIVE)
    second = await store.start_attempt(first.rollout_id)
    await store.add_span(make_span(second, "new"))
    await store.add_span(make_span(first, "late"))
    assert [s.name for s in await store.query_spans(first.rollout_id, "latest")] == ["new"]
    old = await store.query_spans(first.rollout_id, first.attempt.attempt_id)
    assert [s.name for s in old] == ["old", "late"]
    assert len(await store.query_spans(first.rollout_id)) == 3
    assert [s.name for s in await store.query_spans(first.rollout_id, name_contains="l")] == ["old", "late"]
    assert (await store.query_spans(first.rollout_id, name="old", name_contains="new", filter_logic="or")).total == 2


async def test_late_spans_change_no_status(store: LightningStore) -> None:
    claim = await store.start_rollout(1)
    done = await store.update_attempt(claim.rollout_id, "latest", status=AttemptStatus.SUCCEEDED)
    assert await store.add_span(make_span(claim)) is not None
    assert await store.get_latest_attempt(claim.rollout_id) == done


async def test_numpy_values_become_json(store: LightningStore) -> None:
    claim = await store.start_rollout(1)
    await store.add_span(make_span(claim, reward=np.float32(0.5), ids=np.arange(3), big="x" * 3_000_000))
    (span,) = await store.query_spans(claim.rollout_id)
    assert (span.attributes["reward"], span.attributes["ids"]) == (0.5, [0, 1, 2])
    assert len(span.attributes["big"]) == 3_000_000
    with pytest.raises(StoreError, match="type object"):
        await store.add_span(make_span(claim, bad=object()))


@pytest.mark.contract
async def test_text_that_is_no_unicode_is_made_readable(store: LightningStore) -> None:
    """Agents read files and model outputs; one bad character must not cost an attempt."""
    claim = await store.start_rollout(1)
    bad = "caf\udce9"
    span = make_span(claim, "na\0me" + bad, said=bad, **{bad: {"deep": [bad, 1, None]}}).model_copy(
        update={"status": SpanStatus(status_code="ERROR", description=bad), "events": [Event(name=bad)]}
    )
    assert len(await store.add_many_spans([make_span(claim, "good"), span])) == 2
    _, found = await store.query_spans(claim.rollout_id)
    assert found.name == "na?mecaf?"
    assert found.attributes == {"said": "caf?", "caf?": {"deep": ["caf?", 1, None]}}
    assert (found.status.description, found.events[0].name) == ("caf?", "caf?")


async def test_a_span_of_nothing_is_refused(store: LightningStore) -> None:
    claim = await store.start_rollout(1)
    span = make_span(claim).model_copy(update={"attempt_id": "no"})
    with pytest.raises(NotFoundError, match="attempt 'no'"):
        await store.add_span(span)


async def test_spans_of_the_opentelemetry_sdk(store: LightningStore) -> None:
    claim = await store.start_rollout(1)
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("outer") as outer, tracer.start_as_current_span("inner") as inner:
        inner.set_attribute("key", (1, 2))
        inner.add_event("event", {"a": 1})
    for span in (inner, outer):
        await store.add_otel_span(claim.rollout_id, claim.attempt.attempt_id, span)
    stored = {span.name: span for span in await store.query_spans(claim.rollout_id)}
    assert stored["inner"].parent_id == stored["outer"].span_id
    assert stored["inner"].attributes == {"key": [1, 2]}
    assert stored["inner"].events[0].name == "event"
