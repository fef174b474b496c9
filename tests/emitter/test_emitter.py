"""What an agent says about itself becomes spans; what is not a reward is refused; outside a rollout nothing happens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace

from agentlightning.emitter import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    get_rewards,
    is_reward_span,
    operation,
)
from agentlightning.errors import AgentError, ConfigError
from agentlightning.keys import redacted
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import DummyTracer, OtelTracer
from agentlightning.types import AttemptStatus, Span
from agentlightning.types.names import REWARD
from agentlightning.types.reward import AGENTOPS_OUTPUTS


async def record(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Span]:
    """The spans of one call of a function inside a trace."""
    async with DummyTracer().trace_context(rollout_id="r", attempt_id="a") as trace:
        result = function(*args, **kwargs)
        if asyncio.iscoroutine(result):
            await result
    return trace.spans


# ---- rewards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(0.25), np.int64(3)])
async def test_a_reward_is_a_span(value: float) -> None:
    (span,) = await record(emit_reward, value)
    assert span.name == "agentlightning.annotation"
    assert span.attributes == {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": float(value)}
    assert (span.rollout_id, span.attempt_id) == ("r", "a")
    assert is_reward_span(span)
    assert get_reward_value(span) == float(value)


async def test_the_primary_reward_comes_first() -> None:
    (span,) = await record(emit_reward, {"style": 0.1, "correct": 1.0}, primary_key="correct")
    assert get_rewards(span) == {"correct": 1.0, "style": 0.1}
    assert list(get_rewards(span)) == ["correct", "style"]
    assert get_reward_value(span) == 1.0


async def test_a_reward_with_one_part_needs_no_primary_key() -> None:
    (span,) = await record(emit_reward, {"correct": 0}, attributes={"judge": {"name": "exact"}})
    assert get_rewards(span) == {"correct": 0.0}
    assert span.attributes["judge.name"] == "exact"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "finite"),
        (float("inf"), "finite"),
        (10**400, "finite"),
        ("1.0", "must be a number, not str"),
        (None, "must be a number, not NoneType"),
        ({"a": 1, "b": 2}, "primary_key"),
        ({}, "primary_key"),
    ],
)
def test_what_is_not_a_reward_is_refused_even_outside_a_rollout(value: object, message: str) -> None:
    with pytest.raises(AgentError, match=message):
        emit_reward(value)  # pyright: ignore[reportArgumentType]


def test_a_primary_reward_that_is_missing_is_refused() -> None:
    with pytest.raises(AgentError, match="'c' is not among"):
        emit_reward({"a": 1, "b": 2}, primary_key="c")


async def test_the_last_reward_is_the_final_one() -> None:
    def agent() -> None:
        emit_reward(0.1)
        emit_message("more work")
        emit_reward(0.9)

    spans = await record(agent)
    assert len(find_reward_spans(spans)) == 2
    assert find_final_reward(spans) == 0.9
    assert find_final_reward(spans[1:2]) is None
    assert get_reward_value(spans[1]) is None
    assert not is_reward_span(spans[1])


# ---- the others ------------------------------------------------------------------------------------------------------


@dataclass
class Point:
    x: int


async def test_messages_objects_and_annotations() -> None:
    def agent() -> None:
        emit_message("héllo", {"turn": 1})
        emit_object({"point": Point(3), "bad": float("nan")})
        emit_annotation({"tool": {"name": "calc", "ok": True}, "tags": ["a", "b"], "none": {}})

    message, thing, annotation = await record(agent)
    assert message.attributes == {"turn": 1, "agentlightning.message.body": "héllo"}
    assert thing.attributes["agentlightning.object.type"] == "dict"
    assert json.loads(thing.attributes["agentlightning.object.json"]) == {"point": {"x": 3}, "bad": "NaN"}
    assert annotation.attributes == {"tool.name": "calc", "tool.ok": True, "tags": ["a", "b"], "none": {}}


async def test_an_exception_is_recorded_with_its_traceback() -> None:
    def agent() -> None:
        try:
            json.loads("{")
        except ValueError as error:
            emit_exception(error, {"recovered": True})

    (span,) = await record(agent)
    assert span.attributes["exception.type"] == "json.decoder.JSONDecodeError"
    assert "in agent" in span.attributes["exception.stacktrace"]
    assert span.attributes["recovered"] is True
    assert span.status.status_code == "ERROR"


async def test_an_exception_opens_nothing() -> None:
    """HTTP clients name the URL that they asked, and the URL of an attempt is a capability."""
    key = f"c-{'x' * 32}"

    url = f"http://127.0.0.1:1/rollout/r/attempt/a/key/{key}/v1"

    def fails(by: str) -> None:
        raise OSError(f"{by}: no answer from {url}")

    def agent() -> None:
        try:
            fails("client")
        except OSError as error:
            emit_exception(error)
        with contextlib.suppress(OSError):
            operation(fails)("operation")
        with contextlib.suppress(OSError), trace.get_tracer("theirs").start_as_current_span("library"):
            fails("library")
        with trace.get_tracer("httpx").start_as_current_span("POST", attributes={"url.full": url, "urls": [url]}):
            pass

    async with OtelTracer().trace_context(rollout_id="r", attempt_id="a") as recorded:
        agent()
    spans = recorded.spans
    *spans, request = spans
    assert request.attributes == {"url.full": redacted(url), "urls": [redacted(url)]}
    assert key not in request.model_dump_json()
    assert len(spans) == 3
    for span in spans:
        if span.name == "agentlightning.operation":
            assert "exception.message" in span.attributes
        text = span.model_dump_json()
        assert text.count("no answer from http://127.0.0.1:1/rollout/r/attempt/a/key/c-xxx…/v1") >= 3, (
            "it still says where"
        )
        assert key not in text


async def test_what_json_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(AgentError, match="The attribute 'where'"):
        await record(emit_annotation, {"where": object()})
    with pytest.raises(AgentError, match="The object"):
        await record(emit_object, object())


def test_outside_a_rollout_each_emitter_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert emit_message("nobody listens") is None
            with operation("nothing"):
                pass
    assert caplog.text.count("emit_message was called outside a rollout") <= 1
    assert caplog.text.count("operation was called outside a rollout") <= 1


# ---- operations ------------------------------------------------------------------------------------------------------


async def test_a_decorated_function_records_input_and_output() -> None:
    @operation
    def add(a: int, b: int = 2) -> int:
        """Adds."""
        return a + b

    assert add.__doc__ == "Adds."
    assert add(1) == 3  # outside: an ordinary function
    (span,) = await record(add, 1, b=4)
    assert span.name == "agentlightning.operation"
    assert span.attributes["agentlightning.operation.name"].endswith("add")
    assert json.loads(span.attributes["agentlightning.operation.input"]) == {"a": 1, "b": 4}
    assert json.loads(span.attributes["agentlightning.operation.output"]) == 5
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time >= span.start_time


async def test_an_async_function_nested_operations_and_attributes() -> None:
    @operation("outer", kind="plan")
    async def outer() -> str:
        async with operation("inner") as op:
            await asyncio.sleep(0)
            op.set_attributes(hits=3)
            op.set_input(object)
        return "done"

    inner_span, outer_span = await record(outer)
    assert inner_span.parent_id == outer_span.span_id
    assert outer_span.parent_id is None
    assert outer_span.attributes["kind"] == "plan"
    assert inner_span.attributes["hits"] == 3
    assert "object" in inner_span.attributes["agentlightning.operation.input"]


async def test_concurrent_calls_of_one_operation_are_siblings() -> None:
    @operation
    async def step(i: int) -> int:
        await asyncio.sleep(0.001 * (3 - i))
        return i

    @operation("all")
    async def everything() -> None:
        await asyncio.gather(*(step(i) for i in range(3)))

    spans = await record(everything)
    whole = spans[-1]
    assert [s.parent_id for s in spans[:-1]] == [whole.span_id] * 3
    assert len({s.span_id for s in spans}) == 4


async def test_recursion() -> None:
    @operation
    def down(n: int) -> int:
        return n if n == 0 else down(n - 1)

    spans = await record(down, 3)
    for child, parent in pairwise(spans):
        assert child.parent_id == parent.span_id


async def test_an_exception_passes_through_and_is_recorded() -> None:
    @operation
    def boom() -> None:
        raise KeyError("gone")

    async def agent() -> None:
        with pytest.raises(KeyError):
            boom()
        span = emit_message("after")
        assert span is not None
        assert span.parent_id is None

    spans = await record(agent)
    assert spans[0].status.status_code == "ERROR"
    assert spans[0].attributes["exception.type"] == "KeyError"
    assert "agentlightning.operation.output" not in spans[0].attributes


async def test_a_call_with_wrong_arguments_fails_as_it_would_without() -> None:
    @operation
    def one(a: int) -> int:
        return a

    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        await record(one)


def test_generators_are_refused() -> None:
    def numbers() -> Iterator[int]:
        yield 1

    with pytest.raises(ConfigError, match="generator"):
        operation(numbers)


async def test_an_operation_is_entered_once() -> None:
    def agent() -> None:
        op = operation("again")
        with op:
            pass
        with pytest.raises(ConfigError, match="entered already"), op:
            pass

    await record(agent)


class Mute(Exception):
    """Nothing can be said of it."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


async def test_an_operation_never_fails_for_what_it_records() -> None:
    circle: list[Any] = []
    circle.append(circle)

    @operation
    def odd(value: Any) -> Any:
        return value

    @operation
    def boom() -> None:
        raise Mute

    for value, seen in ((circle, "[[...]]"), ("caf\udce9", "caf\\udce9"), ({1: Mute()}, "dict without a repr")):
        (span,) = await record(odd, value)
        assert seen in json.loads(span.attributes["agentlightning.operation.output"])

    def agent() -> None:
        with pytest.raises(Mute):
            boom()

    (span,) = await record(agent)
    assert span.status.status_code == "ERROR"


@pytest.mark.parametrize("value", ["good", "NaN", float("nan"), float("inf"), None, [1.0], {"a": 1}])
def test_what_no_emitter_would_write_is_no_reward(value: Any) -> None:
    """Spans come over the wire too: one that says nonsense must not end a training."""
    key = "agentlightning.reward.0.value"
    spans = [Span.from_attributes(name="x", attributes={key: v}, rollout_id="r", attempt_id="a") for v in (0.5, value)]
    assert [is_reward_span(span) for span in spans] == [True, False]
    assert find_final_reward(spans) == 0.5
    assert (get_reward_value(spans[1]), get_rewards(spans[1])) == (None, {})


OUTPUT = '{"type": "reward", "value": 0.25}'


@pytest.mark.parametrize(
    ("name", "attributes", "value"),
    [
        ("op", {"agentops.task.output": OUTPUT}, 0.25),
        ("op", {"agentops.entity.output": OUTPUT}, 0.25),
        ("op", {"agentops.entity.output": {"type": "reward", "value": 1}}, 1.0),
        ("op", {"agentops.entity.output": '{"type": "reward", "value": null}'}, None),
        ("op", {"agentops.entity.output": '{"type": "text", "value": 1}'}, None),
        ("op", {"agentops.entity.output": "0.5"}, None),
        ("op", {"agentops.entity.output": '{"type": "reward"'}, None),
        ("agentlightning.reward", {"reward": 0.25}, 0.25),
        ("agentlightning.reward", {"reward": "much"}, None),
        ("op", {"reward": 0.25}, None),
        ("op", {"agentops.task.output": OUTPUT, "agentlightning.reward.0.value": 0.75}, 0.75),
    ],
)
def test_rewards_of_agentops_and_of_older_spans_are_read(
    name: str, attributes: dict[str, Any], value: float | None
) -> None:
    span = Span.from_attributes(name=name, attributes=attributes)
    assert get_reward_value(span) == find_final_reward([span]) == value
    assert is_reward_span(span) is (value is not None)
    assert list(get_rewards(span).values()) == ([] if value is None else [value])


async def test_the_store_finds_such_rewards_too() -> None:
    """In what it gives to train on, and in what rollouts are found by."""
    store = InMemoryLightningStore()
    given = [("op", {key: OUTPUT}) for key in AGENTOPS_OUTPUTS] + [(REWARD, {"reward": 0.25}), ("op", {"reward": 0.25})]
    ids: list[str] = []
    for name, attributes in given:
        begun = await store.start_rollout("task")
        at = (begun.rollout_id, begun.attempt.attempt_id)
        await store.add_span(Span.from_attributes(name=name, attributes=attributes, rollout_id=at[0], attempt_id=at[1]))
        await store.update_attempt(*at, status=AttemptStatus.SUCCEEDED)
        ids.append(at[0])
    records = await store.query_records(ids)
    assert [find_final_reward(record.spans) for record in records] == [0.25, 0.25, 0.25, None]
    found = await store.query_rollouts(reward_min=0.25)
    assert {rollout.rollout_id for rollout in found} == set(ids[:3])
    await store.close()
