"""Stop strings over a real byte-level tokenizer: completed inside a token, across tokens, across bytes of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentlightning.engine.running import StopStrings
from agentlightning.gateway.replay import stopped_by
from agentlightning.learner.policy import Policy
from agentlightning.types.recording import RecordedCall


def first_hit(policy: Policy, text: str, stop: tuple[str, ...]) -> tuple[int, str] | None:
    """After how many tokens of the text a stop string is found, and which."""
    stops = StopStrings(policy.tokenizer)
    ids = np.array(policy.tokenizer.encode(text), dtype=np.int32)
    for count in range(1, len(ids) + 1):
        found = stops.find(ids[:count], stop)
        if found is not None:
            return count, found
    return None


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("Say hello world.", "lo wo"),
        ("line one\n\nline two", "\n\n"),
        ("The answer is 182. The", "answer"),
        ("naïve café 🙂 ok", "🙂"),
        ("naïve café 🙂 ok", "é"),
        ("a </tool_call> b", "</tool_call>"),
        ("bye<|im_end|>", "<|im_end|>"),
        ("two  spaces ", "  "),
    ],
)
def test_found_with_the_token_that_completes_it(policy: Policy, text: str, stop: str) -> None:
    hit = first_hit(policy, text, ("nowhere", stop))
    assert hit is not None
    count, found = hit
    ids = policy.tokenizer.encode(text)
    assert found == stop
    assert stop in policy.tokenizer.decode(ids[:count])
    assert stop not in policy.tokenizer.decode(ids[: count - 1])


def test_not_found(policy: Policy) -> None:
    assert first_hit(policy, "Say hello world.", ("word", "Hello", "held")) is None


def test_the_one_that_begins_first_is_named(policy: Policy) -> None:
    hit = first_hit(policy, "x</tool_call>", ("call>", "</tool_call>"))
    assert hit is not None
    assert hit[1] == "</tool_call>"


@pytest.mark.parametrize("stop", [("lo wo",), ("🙂", "é"), ("call>", "</tool_call>"), ("nowhere",), ()])
def test_a_recorded_answer_ends_with_the_stop_string_that_the_engine_found(
    policy: Policy, stop: tuple[str, ...]
) -> None:
    decode: Any = policy.tokenizer.decode
    for text in ("Say hello world.", "naïve café 🙂 ok", "x</tool_call>"):
        hit = first_hit(policy, text, stop) if stop else None
        ids = policy.tokenizer.encode(text)[: None if hit is None else hit[0]]
        floats = [0.0] * len(ids)
        given: dict[str, Any] = {"call_id": "c", "policy": "p", "prompt_keep": 0, "prompt_ids": [], "versions": []}
        call = RecordedCall(response_ids=ids, logprobs=floats, plain_logprobs=floats, **given)
        assert stopped_by(call, stop, decode) == (None if hit is None else hit[1])
        assert stopped_by(call.model_copy(update={"length": True}), stop, decode) is None
