"""Spans → conversations in the form that fine-tuning at OpenAI (and most tools) reads, tools included. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agentlightning.adapter.conversations import Conversation, conversations
from agentlightning.arguments import explained_class
from agentlightning.types import Span
from agentlightning.types.data import RolloutRecord
from agentlightning.types.names import CALL_ID


@explained_class
class TraceToMessages:
    """Whole conversations: `{"messages": [...], "tools": [...]}`, one for each call that no later call continues.

    Args:
        agent_match: A regular expression; only conversations of agents whose name it finds something in.
        llm_call_match: A regular expression for the names of spans that are model calls; None takes those that say so.
    """

    def __init__(self, agent_match: str | None = None, llm_call_match: str | None = None) -> None:
        self.agent_match = agent_match
        self.llm_call_match = llm_call_match

    def adapt(self, spans: Sequence[Span]) -> list[dict[str, Any]]:
        """The conversations of one attempt, in the order in which they ended."""
        found = conversations(spans, llm_call_match=self.llm_call_match, agent_match=self.agent_match)
        answered = [c for c in found if c.answer is not None]
        return [_example(c) for c in answered if not any(_continues(d, c) for d in answered)]

    def to_jsonl(self, attempts: Sequence[Sequence[Span]]) -> str:
        """The conversations of several attempts, a line of JSON each."""
        return "".join(json.dumps(e, ensure_ascii=False) + "\n" for spans in attempts for e in self.adapt(spans))


def policy_conversations(record: RolloutRecord, spans: Sequence[Span]) -> list[list[dict[str, Any]]]:
    """The messages of each conversation with the policy in training, of the attempt that has these spans: without the
    calls of judges and other models."""
    others = {c.info.call_id for c in record.calls if not c.info.trained}
    if len(others) < len(record.calls):
        spans = [s for s in spans if s.attributes.get(CALL_ID) not in others]
    return [one["messages"] for one in TraceToMessages().adapt(spans)]


def _continues(later: Conversation, earlier: Conversation) -> bool:
    """Whether `later` goes on from `earlier`; calls that are not known to continue one are compared by messages."""
    if later is earlier:
        return False
    if later.parent_call_id:
        return later.parent_call_id == earlier.call_id
    whole = [*earlier.messages, earlier.answer]
    return len(later.messages) >= len(whole) and list(later.messages[: len(whole)]) == whole


def _example(c: Conversation) -> dict[str, Any]:
    messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in (*c.messages, c.answer or {})]
    example: dict[str, Any] = {"messages": messages}
    if c.tools:
        example["tools"] = list(c.tools)
    return example
