"""Spans that an agent's own code reported, with anything in the attributes that are read: nobody ends by them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest

from agentlightning.adapter.conversations import conversations
from agentlightning.adapter.tools import tool_outcomes
from agentlightning.algorithm.prompts.evaluation import _usage  # pyright: ignore[reportPrivateUsage]
from agentlightning.cli.show import _finish  # pyright: ignore[reportPrivateUsage]
from agentlightning.cli.transcript import log, transcript
from agentlightning.types import Span
from agentlightning.types.call import left_out_of, spent_of
from agentlightning.types.names import COST, EXECUTOR_ID, LEFT_OUT, MESSAGE_BODY, OPERATION_OUTPUT, SAME_INPUT

DEEP = '{"a":' * 3000 + "1" + "}" * 3000
PARTS: list[Any] = [5, None, {}, {"type": []}, {"type": "text", "content": 5}, {"type": "image_url", "image_url": 5}]
PARTS += [{"type": "tool_call", "name": 5, "id": [], "arguments": 5}, {"type": "tool_call"}]
PARTS += [{"type": "tool_call_response", "id": {}, "result": DEEP}]
MESSAGES: list[Any] = [5, None, {}, {"role": 5}, {"role": "user", "parts": 5}, {"role": "user", "parts": PARTS}]
ODD: list[Any] = ["", "{not json", "null", "5", '"x"', "[5]", DEEP, "9" * 5000, "NaN", json.dumps(MESSAGES)]
ODD += [
    '[{"field":"a","why":"b","kind":"unknown","more":' + "[" * 5000,
    True,
    1e308,
    math.nan,
    [],
    ["x"],
    [True, [1]],
    {"a": 1},
    MESSAGES,
]
NAMES = (
    *("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.tool.definitions", "gen_ai.agent.name"),
    *("gen_ai.response.id", "gen_ai.response.finish_reasons", "gen_ai.usage.input_tokens", "gen_ai.provider.name"),
    *("gen_ai.tool.call.id", "gen_ai.tool.call.result", "gen_ai.tool.name", "gen_ai.prompt.0.role"),
    *("gen_ai.prompt.0.content", "gen_ai.completion.0.tool_calls.0.name", "gen_ai.request.functions.0.parameters"),
    *("prompt_token_ids", "response_token_ids", "tool.name", "agentlightning.response"),
    *(COST, EXECUTOR_ID, LEFT_OUT, MESSAGE_BODY, OPERATION_OUTPUT, SAME_INPUT),
)
KINDS: list[dict[str, Any]] = [{"gen_ai.operation.name": "chat"}, {"gen_ai.operation.name": "execute_tool"}]
KINDS += [{"gen_ai.response.id": "r"}, {"agentlightning.response": "{}"}]
READERS: dict[str, Callable[[Sequence[Span]], object]] = {
    "conversations": conversations,
    "repaired": lambda spans: conversations(spans, repair_hierarchy=True),
    "as JSON": lambda spans: json.dumps([[c.messages, c.answer, list(c.tools)] for c in conversations(spans)]),
    "tools by name": lambda spans: [[tool.get("function") for tool in c.tools] for c in conversations(spans)],
    "tool outcomes": tool_outcomes,
    "transcript": transcript,
    "full transcript": lambda spans: transcript(spans, full=True),
    "log": log,
    "left out": left_out_of,
    "spent": lambda spans: [spent.words() for spent in spent_of(spans).values()],
    "finish": lambda spans: json.dumps([_finish(span)["finish_reason"] for span in spans]),
    "usage": lambda spans: [_usage(span) for span in spans],
}


def strange() -> Iterator[list[Span]]:
    """Two spans of an attempt, of which both say the same, the second below the first."""
    for kind, name, value in product(KINDS, NAMES, ODD):
        attributes = {**kind, name: value}
        first = Span.from_attributes(rollout_id="r", attempt_id="a", attributes=attributes)
        yield [first, first.model_copy(update={"span_id": "b" * 16, "parent_id": first.span_id})]


@pytest.mark.parametrize("reader", READERS)
def test_whatever_an_agents_span_says_is_read(reader: str) -> None:
    for spans in strange():
        READERS[reader](spans)
