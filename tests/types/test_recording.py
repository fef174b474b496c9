"""What a recording takes from spans that anybody may have written, such as those of a store from elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.types import Span, recorded_tools
from agentlightning.types.names import (
    CALL_ID,
    OPERATION,
    OPERATION_INPUT,
    OPERATION_NAME,
    OPERATION_OUTPUT,
    REPLAYABLE,
    REPLAYABLE_INSIDE,
)
from agentlightning.types.recording import tool_call_ids_of

ANSWER = '[{"role": "assistant", "parts": [{"type": "tool_call", "id": "t1"}, {"type": "text", "content": "?"}]}]'
TOOL = {REPLAYABLE: True, OPERATION_NAME: "add", OPERATION_INPUT: "{}", OPERATION_OUTPUT: "3"}


def span_of(attributes: dict[str, Any]) -> Span:
    return Span(rollout_id="ro", attempt_id="at", name=OPERATION, span_id="s", trace_id="t", attributes=attributes)


@pytest.mark.parametrize(
    "output", ["", "[", "3", "null", "[1]", '["x"]', '{"parts": 1}', '[{"parts": 3}]', '[{"parts": [1]}]', "[" * 10**5]
)
def test_what_is_no_answer_is_passed_over(output: str) -> None:
    bad = span_of({CALL_ID: "c1", "gen_ai.output.messages": output})
    good = span_of({CALL_ID: "c2", "gen_ai.output.messages": ANSWER})
    found = tool_call_ids_of([bad, good, span_of({CALL_ID: ["c3"], "gen_ai.output.messages": ANSWER})])
    assert found.get("c1", []) == []
    assert found["c2"] == ["t1"]


@pytest.mark.parametrize("name", [OPERATION_NAME, OPERATION_INPUT, OPERATION_OUTPUT, REPLAYABLE_INSIDE])
def test_what_is_no_record_of_a_tool_is_passed_over(name: str) -> None:
    found = recorded_tools([span_of({**TOOL, name: 3}), span_of(TOOL)])
    assert [(one.name, one.result) for one in found] == [("add", "3")]


def test_a_tool_without_a_result_runs_again() -> None:
    failed = {name: value for name, value in TOOL.items() if name != OPERATION_OUTPUT}
    assert [one.result for one in recorded_tools([span_of({**failed, REPLAYABLE: False}), span_of(failed)])] == [
        None
    ] * 2
