"""Intermediate rewards: tool outcomes from what is recorded, bound to the call that made the tool call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentlightning.adapter.tools import tool_outcomes
from agentlightning.runner.air import Air
from agentlightning.types import Span
from agentlightning.types.names import REWARD_RESPONSE
from agentlightning.types.reward import find_final_reward, get_reward_value, reward_attributes
from agentlightning.types.span import SpanStatus


def span(name: str, at: float, *, error: str | None = None, **attributes: Any) -> Span:
    status = SpanStatus(status_code="ERROR", description=error) if error else SpanStatus(status_code="OK")
    plain = {k.replace("__", "."): v for k, v in attributes.items()}
    made = Span.from_attributes(name=name, attributes=plain, rollout_id="r", attempt_id="a", start_time=at, end_time=at)
    return made.model_copy(update={"status": status})


def call(number: int, *tools: tuple[str, str], results: dict[str, str] | None = None) -> Span:
    """A model call at time `number` that asks for tools (id, name), given the results of earlier ones."""
    asked = [{"type": "tool_call", "id": i, "name": n, "arguments": '{"a":1}'} for i, n in tools]
    given = [{"type": "tool_call_response", "id": i, "response": r} for i, r in (results or {}).items()]
    return span(
        "chat policy",
        float(number),
        gen_ai__response__id=f"resp-{number}",
        gen_ai__output__messages=json.dumps([{"role": "assistant", "parts": asked}]),
        gen_ai__input__messages=json.dumps([{"role": "tool", "parts": given}]),
    )


def test_results_that_the_next_call_is_given() -> None:
    spans = [
        call(1, ("x", "calc"), ("y", "search")),
        call(2, ("z", "calc"), results={"x": "5", "y": "Error: no network"}),
        call(3, results={"z": '{"error": "division by zero"}'}),
    ]
    found = tool_outcomes(spans)
    assert [(o.name, o.output, o.error, o.response_id) for o in found] == [
        ("calc", "5", None, "resp-1"),
        ("search", "Error: no network", "Error: no network", "resp-1"),
        ("calc", '{"error": "division by zero"}', "division by zero", "resp-2"),
    ]


TOOL_SPANS: dict[str, dict[str, Any]] = {
    "genai": {"gen_ai__operation__name": "execute_tool", "gen_ai__tool__name": "calc", "gen_ai__tool__call__id": "x"},
    "openinference": {"openinference__span__kind": "TOOL", "tool__name": "calc"},
    "agentops": {"agentops__span__kind": "tool", "tool__name": "calc"},
    "operation": {"agentlightning__operation__name": "calc"},
}


@pytest.mark.parametrize("kind", list(TOOL_SPANS))
def test_tool_spans_of_frameworks(kind: str) -> None:
    name = "agentlightning.operation" if kind == "operation" else "tool"
    failed = tool_outcomes([call(1, ("x", "calc")), span(name, 2.0, error="boom", **TOOL_SPANS[kind])])
    assert [(o.name, o.error, o.response_id) for o in failed] == [("calc", "boom", "resp-1")]


def test_a_tool_that_both_say_something_about_counts_once_and_the_error_wins() -> None:
    spans = [
        call(1, ("x", "calc")),
        span("tool", 1.5, error="boom", **TOOL_SPANS["openinference"]),
        call(2, results={"x": "something went wrong"}),
    ]
    assert [(o.error, o.response_id) for o in tool_outcomes(spans)] == [("boom", "resp-1")]


def test_an_operation_that_no_model_asked_for_is_no_tool() -> None:
    assert tool_outcomes([call(1), span("agentlightning.operation", 2.0, agentlightning__operation__name="load")]) == []


@pytest.fixture
def rules() -> Air:
    return Air()


def test_rules_reward_the_call_that_made_the_tool_call(rules: Air) -> None:
    @rules.on_tool_success
    def good(tool_name: str, output: str) -> float:
        return 0.3 if tool_name == "calc" else 0.1

    @rules.on_tool_failure
    def bad(tool_name: str, error: str) -> float:
        return -0.2

    spans = [call(1, ("x", "calc"), ("y", "search")), call(2, results={"x": "5", "y": "Error"})]
    rewards = rules.rewards(spans, "r", "a")
    assert [(get_reward_value(s), s.attributes[REWARD_RESPONSE]) for s in rewards] == [
        (0.3, "resp-1"),
        (-0.2, "resp-1"),
    ]
    final = span("agentlightning.reward", 3.0)
    final = final.model_copy(update={"attributes": reward_attributes(1.0)})
    assert find_final_reward([*spans, final, *rewards]) == 1.0, "an intermediate reward is never the final one"


def test_rules_on_any_span(rules: Air) -> None:
    @rules.on_span(lambda s: s.name == "retrieval")
    def retrieved(s: Span) -> float:
        return 0.5

    rewards = rules.rewards([call(1), span("retrieval", 2.0), call(3)], "r", "a")
    assert [(get_reward_value(s), s.attributes[REWARD_RESPONSE]) for s in rewards] == [(0.5, "resp-1")]


def test_a_rule_that_fails_or_gives_no_number_gives_none(rules: Air, caplog: pytest.LogCaptureFixture) -> None:
    rules.on_tool_success(lambda tool_name, output: 1 / 0)
    rules.on_tool_success(lambda tool_name, output: float("nan"))
    rules.on_tool_success(lambda tool_name, output: None)
    assert rules.rewards([call(1, ("x", "calc")), call(2, results={"x": "5"})], "r", "a") == []
    assert len(caplog.records) == 2


def test_rules_can_be_switched_off(rules: Air) -> None:
    rules.on_tool_success(lambda tool_name, output: 1.0)
    assert rules
    rules.enabled = False
    assert not rules
