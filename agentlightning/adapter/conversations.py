"""Model calls as adapters read them: the whole conversation, the agent and the rewards of each. Pure.

A call may be recorded twice, by the gateway and by an instrumented framework; both spans carry the same response id and
become one call. The gateway's span holds only what is new since the call it continues: here the whole is put together.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentlightning.adapter.matching import MATCHES, RewardMatch, below_what_encloses, is_in_reward
from agentlightning.adapter.numbered import (
    MadeCalls,
    calls_below,
    messages_in,
    numbered_messages,
    numbered_tools,
    read_json,
    text_at,
    tools_in,
)
from agentlightning.types import Span
from agentlightning.types.names import CALL_ID, EXECUTOR_ID, PARENT_CALL_ID, REWARD_RESPONSE, SAME_INPUT
from agentlightning.types.reward import find_reward_spans, get_reward_value, is_reward_span, names_call

Message = dict[str, Any]
AGENT_NAMES = (
    *("gen_ai.agent.name", "agent.name", "agentops.agent.name", "recipient_agent_type"),
    "langchain.chain.type",
)
_AGENT_KINDS = (("openinference.span.kind", "AGENT"), ("agentops.span.kind", "agent"), ("traceloop.span.kind", "agent"))
_PROMPT_IDS = ("prompt_token_ids", "llm.hosted_vllm.prompt_token_ids")
_RESPONSE_IDS = ("response_token_ids", "llm.hosted_vllm.response_token_ids")


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """One model call with everything that led to it."""

    span: Span
    call_id: str | None
    """The gateway's; None for a call that only a framework recorded."""
    response_id: str | None
    parent_call_id: str | None
    agent: str | None
    messages: Sequence[Message]
    """The prompt, in the form of OpenAI's chat completions."""
    answer: Message | None
    tools: Sequence[Any]
    prompt_ids: Sequence[int] | None = None
    response_ids: Sequence[int] | None = None
    reward: float | None = None


def conversations(
    spans: Sequence[Span],
    *,
    llm_call_match: str | None = None,
    agent_match: str | None = None,
    reward_match: RewardMatch = "last",
    repair_hierarchy: bool = True,
    exclude_llm_call_in_reward: bool = True,
) -> list[Conversation]:
    """The model calls among the spans of one attempt, in the order in which they began.

    llm_call_match: a regular expression for the names of spans that are model calls; None takes those that say so.
    agent_match: a regular expression; only calls of agents whose name it finds something in.
    reward_match: which call a reward belongs to that names no response; see `matching.MATCHES`.
    repair_hierarchy: whether a span that hangs in the air belongs to the agent whose span encloses it in time.
    exclude_llm_call_in_reward: whether calls inside a span that gives a reward are left out.
    """
    if repair_hierarchy:
        ours = [s for s in spans if CALL_ID not in s.attributes]  # the gateway knows whose its calls are
        loose = [s for s in ours if is_reward_span(s) or _is_call(s, llm_call_match)]
        spans = [*(below := below_what_encloses(loose, ours)).values(), *(s for s in spans if s.span_id not in below)]
    by_id = {s.span_id: s for s in spans}
    children: dict[str | None, list[Span]] = defaultdict(list)
    for span in spans:
        children[span.parent_id].append(span)
    by_call = {s.attributes[CALL_ID]: s for s in spans if CALL_ID in s.attributes}
    known: dict[str, Conversation] = {}
    found: dict[str, Conversation] = {}
    ordered = sorted(spans, key=lambda s: (s.start_time or 0.0, s.sequence_id))
    gateways = {
        text_at(s.attributes, "gen_ai.response.id") for s in ordered if CALL_ID in s.attributes and not _failed(s)
    }
    agents, made, in_reward = _Agents(by_id), MadeCalls(), dict[str, bool]()
    by_framework: dict[str, Conversation] = {}
    """What frameworks say of calls that the gateway recorded, by response id; a response may have several choices."""
    for span in ordered:
        if _failed(span) or not _is_call(span, llm_call_match):
            continue
        if exclude_llm_call_in_reward and is_in_reward(span, by_id, in_reward):
            continue
        call = _read(span, by_call.get(text_at(span.attributes, SAME_INPUT) or "", span), agents, known)
        if not call.call_id:
            call = _with_calls(call, children[span.span_id], made)
        if call.answer is not None and call.answer.get("tool_calls"):
            made.add(call.messages, call.answer)
        if call.call_id:
            known[call.call_id] = found[call.call_id] = call
        elif call.response_id in gateways:
            by_framework[call.response_id or ""] = call
        else:
            found[call.response_id or span.span_id] = call
    whole = [_merged(c, by_framework[c.response_id]) if c.response_id in by_framework else c for c in found.values()]
    taken = [c for c in whole if agent_match is None or (c.agent and re.search(agent_match, c.agent))]
    return _rewarded(taken, spans, reward_match)


def _failed(span: Span) -> bool:
    """A call of the gateway's that was refused or broke off: the agent was given nothing by it."""
    return CALL_ID in span.attributes and span.status.status_code == "ERROR"


def _is_call(span: Span, pattern: str | None) -> bool:
    if pattern is not None:
        return re.search(pattern, span.name) is not None
    a = span.attributes
    says = a.get("gen_ai.operation.name") in ("chat", "text_completion") or a.get("openinference.span.kind") == "LLM"
    return says or CALL_ID in a or ("gen_ai.response.id" in a and "gen_ai.operation.name" not in a)


def _read(span: Span, with_input: Span, agents: _Agents, known: Mapping[str, Conversation]) -> Conversation:
    """`with_input`: the span that holds the call's input, itself or that of the response's first choice."""
    a = span.attributes
    parent = known.get(text_at(a, PARENT_CALL_ID) or "")
    before = [*parent.messages, *([parent.answer] if parent.answer else [])] if parent else []
    answers = _messages(a.get("gen_ai.output.messages")) or numbered_messages(a, "gen_ai.completion")
    tools = tools_in(with_input.attributes.get("gen_ai.tool.definitions")) or numbered_tools(with_input.attributes)
    return Conversation(
        span=span,
        call_id=a.get(CALL_ID),
        response_id=text_at(a, "gen_ai.response.id"),
        parent_call_id=a.get(PARENT_CALL_ID),
        agent=agents.of(span),
        messages=[
            *before,
            *(_messages(with_input.attributes.get("gen_ai.input.messages")) or numbered_messages(a, "gen_ai.prompt")),
        ],
        answer=answers[0] if answers else None,
        tools=tools or (parent.tools if parent else ()),
        prompt_ids=_first(a, _PROMPT_IDS),
        response_ids=_first(a, _RESPONSE_IDS),
    )


class _Agents:
    """The agents that spans belong to."""

    def __init__(self, by_id: Mapping[str, Span]) -> None:
        self._by_id = by_id
        self._known: dict[str, tuple[str | None, str | None, str | None]] = {}

    def of(self, span: Span) -> str | None:
        """What it or the nearest span around it says. A workflow's step around them names it first; what the gateway
        recorded stands.
        """
        step, named, nearest = self._around(span)
        return nearest if CALL_ID in span.attributes else step or named

    def _around(self, span: Span) -> tuple[str | None, str | None, str | None]:
        """The nearest workflow's step, the nearest name, and the nearer of both."""
        passed: list[Span] = []
        at: Span | None = span
        while at is not None and at.span_id not in self._known:
            self._known[at.span_id] = None, None, None  # so that spans in a circle end
            passed.append(at)
            at = self._by_id.get(at.parent_id or "")
        found = (None, None, None) if at is None else self._known[at.span_id]
        for one in reversed(passed):
            step = str(one.attributes[EXECUTOR_ID]) if one.attributes.get(EXECUTOR_ID) else None
            named = _named(one)
            found = self._known[one.span_id] = step or found[0], named or found[1], step or named or found[2]
        return found


def _named(span: Span) -> str | None:
    a = span.attributes
    of_weave = "agentlightning.operation.input.name" if a.get("type") == "agent" else ""
    of_chain = "lc_name" if span.name.startswith("langchain.Chain.") else ""
    for name in (*AGENT_NAMES, of_weave, of_chain):
        if a.get(name):
            return str(a[name])
    is_agent = any(a.get(key) == kind for key, kind in _AGENT_KINDS)
    return str(a.get("operation.name") or span.name) if is_agent else None


def _merged(best: Conversation, rest: Conversation) -> Conversation:
    """The gateway's record of a call, with what a framework knows besides."""
    return replace(
        best,
        agent=best.agent or rest.agent,
        prompt_ids=best.prompt_ids or rest.prompt_ids,
        response_ids=best.response_ids or rest.response_ids,
    )


def _with_calls(call: Conversation, below: Sequence[Span], made: MadeCalls) -> Conversation:
    """A call with the tool calls that AgentOps tells of elsewhere: below the answer's span, and of earlier answers."""
    answer = call.answer
    if answer is not None and not answer.get("tool_calls") and (calls := calls_below(below)):
        answer = {**answer, "content": answer["content"] or None, "tool_calls": calls}
    return replace(call, answer=answer, messages=made.filled(call.messages))


def _rewarded(calls: Sequence[Conversation], spans: Sequence[Span], match: RewardMatch) -> list[Conversation]:
    own: dict[str, float] = {}
    for span in find_reward_spans(spans):
        if names_call(span.attributes):
            named = str(span.attributes[REWARD_RESPONSE])
            own[named] = own.get(named, 0.0) + (get_reward_value(span) or 0.0)
    last = {c.response_id or "": i for i, c in enumerate(calls)}
    rewards = [own.get(c.response_id or "") if last[c.response_id or ""] == i else None for i, c in enumerate(calls)]
    whole = [s for s in spans if not names_call(s.attributes)]
    for index, value in MATCHES[match]([c.span for c in calls], whole).items():
        rewards[index] = value + (rewards[index] or 0.0)
    return [replace(c, reward=r) for c, r in zip(calls, rewards, strict=True)]


def _messages(text: Any) -> list[Message]:
    return [message_of_parts(m) for m in messages_in(text)]


def message_of_parts(shaped: Mapping[str, Any]) -> Message:
    """A message of the GenAI conventions in the form of OpenAI's chat completions."""
    message: Message = {"role": shaped.get("role", "user"), "content": ""}
    calls: list[Any] = []
    texts: list[str] = []
    several: list[Any] = []
    for part in shaped.get("parts", ()):
        match part.get("type"):
            case "text" if not several:
                texts.append(str(part.get("content") or ""))
            case "text" | "uri" | "image_url":
                if not several and (text := "".join(texts)):
                    several.append({"type": "text", "text": text})
                several.append(_one_of_several(part))
            case "reasoning":
                message["reasoning_content"] = part.get("content")
            case "tool_call_response":
                result = part.get("response", part.get("result"))
                texts, several = [result if isinstance(result, str) else json.dumps(result)], []
                message["tool_call_id"] = part.get("id")
            case "tool_call":
                arguments = part.get("arguments")
                arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
                function = {"name": part.get("name"), "arguments": arguments}
                calls.append({"id": part.get("id"), "type": "function", "function": function})
    message["content"] = several or "".join(texts)
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return message


def _one_of_several(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a content, in the form of chat completions: a text or an image."""
    if part.get("type") == "text":
        return {"type": "text", "text": part.get("content") or ""}
    image = part.get("image_url", {"url": part.get("uri")})
    return {"type": "image_url", "image_url": image if isinstance(image, dict) else {"url": image}}


def _first(attributes: Mapping[str, Any], names: Sequence[str]) -> Sequence[int] | None:
    for name in names:
        value = attributes.get(name)
        ids = read_json(value, value)
        if isinstance(ids, list | tuple) and all(isinstance(one, int) for one in ids):
            return [int(one) for one in ids]
    return None
