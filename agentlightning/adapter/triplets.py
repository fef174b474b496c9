"""Spans → triplets: prompt, response and reward of each model call, for training code of one's own. Pure.

`TracerTraceToTriplet` reads every call that was recorded, `LlmProxyTraceToTriplet` those of the gateway only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agentlightning.adapter.conversations import Conversation, conversations
from agentlightning.adapter.matching import MATCHES, RewardMatch
from agentlightning.arguments import can_be, explained_class
from agentlightning.errors import ConfigError
from agentlightning.types import Call, Span, Triplet


@explained_class
class TracerTraceToTriplet:
    """Triplets of the calls that an attempt's spans tell of.

    `prompt` is `{"messages": …, "image_urls": …, "token_ids": …}`, `response` is `{"message": …, "token_ids": …,
    "logprobs": …}`, as far as they are known. Token ids come from the gateway's calls (`store.query_calls`) or from
    spans that carry them.

    Args:
        agent_match: A regular expression; only calls of agents whose name it finds something in.
        llm_call_match: A regular expression for the names of spans that are model calls; None takes those that say so.
        reward_match: Which call a reward belongs to that names no response. "last": the final reward, to the last call.
            "first_occurrence": each reward, to the latest call that had ended and has none yet. "first_sibling": the
            same among spans of the same parent.
        repair_hierarchy: Whether a call without a parent belongs to the agent whose span encloses it in time.
        exclude_llm_call_in_reward: Leave out calls inside a span that gives a reward; they are a judge's.
    """

    def __init__(
        self,
        agent_match: str | None = None,
        llm_call_match: str | None = None,
        reward_match: RewardMatch = "last",
        repair_hierarchy: bool = True,
        exclude_llm_call_in_reward: bool = True,
    ) -> None:
        if reward_match not in MATCHES:
            raise ConfigError(f"reward_match is {reward_match!r}; {can_be(reward_match, MATCHES)}")
        self.agent_match = agent_match
        self.llm_call_match = llm_call_match
        self.reward_match: RewardMatch = reward_match
        self.repair_hierarchy = repair_hierarchy
        self.exclude_llm_call_in_reward = exclude_llm_call_in_reward

    def adapt(self, spans: Sequence[Span], calls: Iterable[Call] = ()) -> list[Triplet]:
        """One triplet per call, in order. A reward that names a response is at its call."""
        tokens = {call.info.call_id: call for call in calls}
        found = conversations(
            spans,
            llm_call_match=self.llm_call_match,
            agent_match=self.agent_match,
            reward_match=self.reward_match,
            repair_hierarchy=self.repair_hierarchy,
            exclude_llm_call_in_reward=self.exclude_llm_call_in_reward,
        )
        return [_triplet(c, tokens.get(c.call_id or "")) for c in found]


class LlmProxyTraceToTriplet(TracerTraceToTriplet):
    """Triplets from the gateway's calls only, whatever else was traced."""

    def adapt(self, spans: Sequence[Span], calls: Iterable[Call] = ()) -> list[Triplet]:
        return [t for t in super().adapt(spans, calls) if t.metadata["call_id"] is not None]


def _triplet(c: Conversation, call: Call | None) -> Triplet:
    prompt: dict[str, Any] = {"messages": list(c.messages), "image_urls": list(_image_urls(c.messages))}
    response: dict[str, Any] = {"message": c.answer}
    if call is not None:
        prompt["token_ids"] = call.prompt_ids.tolist()
        response |= {"token_ids": call.response_ids.tolist(), "logprobs": call.plain_logprobs.tolist()}
    elif c.prompt_ids is not None and c.response_ids is not None:
        prompt["token_ids"], response["token_ids"] = list(c.prompt_ids), list(c.response_ids)
    metadata = {"response_id": c.response_id, "call_id": c.call_id, "agent_name": c.agent, "span_id": c.span.span_id}
    return Triplet(prompt=prompt, response=response, reward=c.reward, metadata=metadata)


def _image_urls(messages: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The addresses of the images in a prompt, in their order."""
    for message in messages:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            image = part.get("image_url") if isinstance(part, Mapping) else None
            if isinstance(image, Mapping) and "url" in image:
                yield str(image["url"])
