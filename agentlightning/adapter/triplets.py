"""Spans → triplets: prompt, response and reward of each model call, for training code of one's own. Pure.

`TracerTraceToTriplet` reads every call that was recorded, `LlmProxyTraceToTriplet` those of the gateway only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from agentlightning.adapter.conversations import Conversation, conversations
from agentlightning.arguments import explained_class
from agentlightning.types import Call, Span, Triplet


@explained_class
class TracerTraceToTriplet:
    """Triplets of the calls that an attempt's spans tell of.

    `prompt` is `{"messages": …, "token_ids": …}`, `response` is `{"message": …, "token_ids": …, "logprobs": …}`, as far
    as they are known. Token ids come from the gateway's calls (`store.query_calls`) or from spans that carry them.

    Args:
        agent_match: A regular expression; only calls of agents whose name it finds something in.
        llm_call_match: A regular expression for the names of spans that are model calls; None takes those that say so.
    """

    def __init__(self, agent_match: str | None = None, llm_call_match: str | None = None) -> None:
        self.agent_match = agent_match
        self.llm_call_match = llm_call_match

    def adapt(self, spans: Sequence[Span], calls: Iterable[Call] = ()) -> list[Triplet]:
        """One triplet per call, in order; a reward that names a response is at its call, the final one at the last."""
        tokens = {call.info.call_id: call for call in calls}
        found = conversations(spans, llm_call_match=self.llm_call_match, agent_match=self.agent_match)
        return [_triplet(c, tokens.get(c.call_id or "")) for c in found]


class LlmProxyTraceToTriplet(TracerTraceToTriplet):
    """The same from the gateway's calls only, whatever else was traced."""

    def adapt(self, spans: Sequence[Span], calls: Iterable[Call] = ()) -> list[Triplet]:
        return [t for t in super().adapt(spans, calls) if t.metadata["call_id"] is not None]


def _triplet(c: Conversation, call: Call | None) -> Triplet:
    prompt: dict[str, Any] = {"messages": list(c.messages)}
    response: dict[str, Any] = {"message": c.answer}
    if call is not None:
        prompt["token_ids"] = call.prompt_ids.tolist()
        response |= {"token_ids": call.response_ids.tolist(), "logprobs": call.plain_logprobs.tolist()}
    elif c.prompt_ids is not None and c.response_ids is not None:
        prompt["token_ids"], response["token_ids"] = list(c.prompt_ids), list(c.response_ids)
    metadata = {"response_id": c.response_id, "call_id": c.call_id, "agent_name": c.agent, "span_id": c.span.span_id}
    return Triplet(prompt=prompt, response=response, reward=c.reward, metadata=metadata)
