"""Where calls and rewards belong that do not say it, and tool calls that AgentOps writes as spans of their own."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.adapter import TracerTraceToTriplet, TraceToMessages
from agentlightning.adapter.conversations import conversations
from agentlightning.adapter.matching import MATCHES, below_what_encloses
from agentlightning.adapter.tools import tool_outcomes
from agentlightning.compat.adapters import RewardMatchPolicy
from agentlightning.errors import ConfigError
from agentlightning.types import Span


def span(name: str, begin: float, end: float, parent: str | None = None, **attributes: Any) -> Span:
    attributes = {key.replace("__", "."): value for key, value in attributes.items()}
    return Span.from_attributes(
        attributes=attributes, name=name, span_id=name, parent_id=parent, trace_id="t", start_time=begin, end_time=end
    )


def call(name: str, begin: float, end: float, parent: str | None = None, **attributes: Any) -> Span:
    return span(name, begin, end, parent, gen_ai__response__id=f"r-{name}", **attributes)


def reward(name: str, at: float, value: float, parent: str | None = None) -> Span:
    given = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": value}
    return span(name, at, at, parent, **given)


TREE = [
    span("root", 0, 100),
    span("one", 1, 50, "root"),
    call("a", 2, 3, "one"),
    call("b", 4, 5, "one"),
    reward("of-b", 6, 0.5, "one"),
    reward("of-a", 7, 0.25, "one"),
    span("two", 51, 90, "root"),
    call("c", 52, 53, "two"),
    reward("late", 95, 1.0, "root"),
]


@pytest.mark.parametrize(
    ("match", "rewards"),
    [
        ("last", [None, None, 1.0]),
        (RewardMatchPolicy.FIRST_OCCURRENCE, [0.25, 0.5, 1.0]),
        (RewardMatchPolicy.FIRST_SIBLING, [0.25, 0.5, None]),
    ],
)
def test_rewards_find_their_calls(match: Any, rewards: list[float | None]) -> None:
    assert [t.reward for t in TracerTraceToTriplet(reward_match=match).adapt(TREE)] == rewards


def test_a_match_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="'first_occurrence'"):
        TracerTraceToTriplet(reward_match="nearest")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("hangs_below", [None, "root", "gone"])
def test_a_call_that_hangs_in_the_air_belongs_to_the_agent_around_it(hangs_below: str | None) -> None:
    spans = [
        span("root", 0, 100),
        span("outer", 1, 90, "root", agent__name="planner"),
        span("inner", 10, 20, "outer", langchain__chain__type="writer"),
        call("a", 11, 12, hangs_below),
        call("b", 60, 61, hangs_below),
    ]
    if hangs_below == "gone":
        spans = spans[1:]
    found = TracerTraceToTriplet().adapt(spans)
    assert [t.metadata["agent_name"] for t in found] == ["writer", "planner"]
    (only,) = TracerTraceToTriplet(agent_match="writer").adapt(spans)
    assert only.metadata["span_id"] == "a"
    assert TracerTraceToTriplet(agent_match="writer", repair_hierarchy=False).adapt(spans) == []


def test_a_judge_inside_a_reward_is_no_call_of_the_agent() -> None:
    spans = [
        call("a", 1, 2),
        span("judged", 3, 9, None, agentops__task__output=json.dumps({"type": "reward", "value": 0.5})),
        call("judge", 4, 5, "judged"),
    ]
    assert [t.metadata["span_id"] for t in TracerTraceToTriplet().adapt(spans)] == ["a"]
    every = TracerTraceToTriplet(exclude_llm_call_in_reward=False).adapt(spans)
    assert [t.metadata["span_id"] for t in every] == ["a", "judge"]


@pytest.mark.parametrize("form", ["numbered", "conventions"])
def test_the_images_of_a_prompt(form: str) -> None:
    if form == "numbered":
        parts = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": "https://x/1.png"}}]
        given = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": json.dumps(parts)}
    else:
        parts = [{"type": "text", "content": "?"}, {"type": "uri", "modality": "image", "uri": "https://x/1.png"}]
        given = {"gen_ai.input.messages": json.dumps([{"role": "user", "parts": parts}])}
    (found,) = TracerTraceToTriplet().adapt([call("a", 1, 2, **given)])
    assert found.prompt["image_urls"] == ["https://x/1.png"]
    (message,) = found.prompt["messages"]
    assert message["content"][0] == {"type": "text", "text": "?"}


def agentops_call(name: str, begin: float, prompt: list[dict[str, Any]], answer: str) -> Span:
    given: dict[str, Any] = {"gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": answer}
    for number, message in enumerate(prompt):
        given |= {f"gen_ai.prompt.{number}.{key}": value for key, value in message.items()}
    return call(name, begin, begin + 1, "root", **given)


def test_tool_calls_that_agentops_writes_below_the_answer_are_in_the_conversation() -> None:
    """As agentops 0.4 writes them (`_create_tool_span`); the second prompt has neither the calls nor their ids."""
    asked = {"role": "user", "content": "What is 2 + 3, and 4 + 5?"}
    results = [{"role": "tool", "content": "5"}, {"role": "tool", "content": "9"}]
    second = [asked, {"role": "assistant", "content": ""}, *results]
    spans = [
        span("root", 0, 100),
        agentops_call("first", 1, [asked], ""),
        *(
            span(
                f"tool_call.{number}",
                2,
                2,
                "first",
                agentops__span__kind="tool",
                tool__name="add",
                tool__parameters='{"a": 2}',
                tool__call__id=f"call-{number}",
                tool__call__type="function",
            )
            for number in (1, 2)
        ),
        agentops_call("second", 3, second, "5 and 9."),
    ]
    (example,) = TraceToMessages().adapt(spans)
    _, made, *given, last = example["messages"]
    assert made["content"] is None
    assert [c["id"] for c in made["tool_calls"]] == ["call-1", "call-2"]
    assert made["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
    assert [m["tool_call_id"] for m in given] == ["call-1", "call-2"]
    assert last == {"role": "assistant", "content": "5 and 9."}
    assert tool_outcomes(spans) == [], "to ask for a tool is not to carry it out"


def smallest_around(inner: Span, outer: list[Span]) -> Span | None:
    """By comparing with each."""
    around = [
        s
        for s in outer
        if (s.start_time or 0) <= (inner.start_time or 0)
        and (s.end_time or 0) >= (inner.end_time or 0)
        and (s.start_time, s.end_time) != (inner.start_time, inner.end_time)
    ]
    return min(around, key=lambda s: (s.end_time or 0) - (s.start_time or 0), default=None)


def test_the_smallest_span_around_is_found_among_many() -> None:
    draw = random.Random(0)
    for _ in range(300):
        times = [(begin := draw.randrange(8), begin + draw.randrange(-1, 8)) for _ in range(draw.randrange(2, 12))]
        spans = [span(f"s{n}", *bounds, parent=f"gone{n}") for n, bounds in enumerate(times)]
        found = below_what_encloses(spans, spans)
        for one in spans:
            expected = smallest_around(one, [s for s in spans if s is not one])
            assert found[one.span_id].parent_id == (expected.span_id if expected else one.parent_id)


TEXT, IMAGE = {"type": "text", "content": "x"}, {"type": "image_url", "image_url": "x"}
MADE = [{"type": "tool_call", "id": "t", "name": "t", "arguments": "{}"}]
RESULTS = [{"role": "tool", "parts": [{"type": "text", "content": "x"}]}]
CALLS = {
    "gen_ai__input__messages": json.dumps([{"role": "user", "parts": [TEXT]}] * 3),
    "gen_ai__output__messages": json.dumps([{"role": "assistant", "parts": MADE}]),
}


def said(messages: list[Any]) -> list[Span]:
    return [call("c", 1, 2, gen_ai__input__messages=json.dumps(messages))]


def of(number: int) -> Span:
    return reward(f"r{number}", number + 1, 1.0, f"p{number}")


HOSTILE: dict[str, Callable[[int], list[Span]]] = {
    "in the air": lambda n: [call(f"c{i}", i, i + 1) for i in range(n)],
    "inside one another": lambda n: [call(f"c{i}", i, 2 * n - i) for i in range(n)],
    "a chain": lambda n: [call(f"c{i}", 1, 2, f"c{i - 1}") for i in range(n)],
    "a circle": lambda n: [call(f"c{i}", 1, 2, f"c{(i + 1) % n}") for i in range(n)],
    "with tool calls": lambda n: [call(f"c{i}", i, i + 1, **CALLS) for i in range(n)],
    "many results": lambda n: said([{"parts": [{**MADE[0], "id": f"t{i}"} for i in range(n)]}, *RESULTS * n]),
    "many texts": lambda n: said([{"parts": [TEXT] * 9 * n}]),
    "many images": lambda n: said([{"parts": [IMAGE, TEXT] * 9 * n}]),
    "rewards": lambda n: [s for i in range(n) for s in (call(f"c{i}", i, i + 1), reward(f"r{i}", i, 1.0))],
    "rewards beside each": lambda n: [s for i in range(n) for s in (call(f"c{i}", i, i + 1, f"p{i}"), of(i))],
}


@pytest.mark.slow
@pytest.mark.parametrize("what", HOSTILE)
def test_time_grows_with_the_spans_and_not_with_their_square(what: str) -> None:
    def seconds(n: int) -> float:
        spans = HOSTILE[what](n)
        took = []
        for _ in range(3):
            began = time.process_time()
            for match in MATCHES:
                conversations(spans, reward_match=match)
            took.append(time.process_time() - began)
        return min(took)

    assert seconds(8 * 200) < 24 * seconds(200)
