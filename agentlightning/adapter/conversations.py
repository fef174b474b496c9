"""Model calls as adapters read them: the whole conversation, the agent and the rewards of each. Pure.

A call may be recorded twice, by the gateway and by an instrumented framework; both spans carry the same response id and
become one call. The gateway's span holds only what is new since the call it continues: here the whole is put together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from agentlightning.types import Span
from agentlightning.types.names import CALL_ID, EXECUTOR_ID, PARENT_CALL_ID, REWARD_RESPONSE, SAME_INPUT
from agentlightning.types.reward import find_final_reward, find_reward_spans, get_reward_value

Message = dict[str, Any]
AGENT_NAMES = ("gen_ai.agent.name", "agent.name", "agentops.agent.name", "recipient_agent_type")
_AGENT_KINDS = (("openinference.span.kind", "AGENT"), ("agentops.span.kind", "agent"), ("traceloop.span.kind", "agent"))
_FUNCTIONS = ("gen_ai.request.functions", "llm.request.functions")
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
    spans: Sequence[Span], *, llm_call_match: str | None = None, agent_match: str | None = None
) -> list[Conversation]:
    """The model calls among the spans of one attempt, in the order in which they began.

    llm_call_match: a regular expression for the names of spans that are model calls; None takes those that say so.
    agent_match: a regular expression; only calls of agents whose name it finds something in.

    A reward that names a response belongs to its call; the final reward to the last call that is taken.
    """
    by_id = {s.span_id: s for s in spans}
    by_call = {s.attributes[CALL_ID]: s for s in spans if CALL_ID in s.attributes}
    known: dict[str, Conversation] = {}
    found: dict[str, Conversation] = {}
    ordered = sorted(spans, key=lambda s: (s.start_time or 0.0, s.sequence_id))
    gateways = {s.attributes.get("gen_ai.response.id") for s in ordered if CALL_ID in s.attributes and not _failed(s)}
    told: dict[str, Conversation] = {}
    """What frameworks say of calls that the gateway recorded, by response id; a response may have several choices."""
    for span in ordered:
        if _failed(span) or not _is_call(span, llm_call_match):
            continue
        call = _read(span, by_call.get(span.attributes.get(SAME_INPUT, ""), span), by_id, known)
        if call.call_id:
            known[call.call_id] = found[call.call_id] = call
        elif call.response_id in gateways:
            told[call.response_id or ""] = call
        else:
            found[call.response_id or span.span_id] = call
    whole = [_merged(c, told[c.response_id]) if c.response_id in told else c for c in found.values()]
    taken = [c for c in whole if agent_match is None or (c.agent and re.search(agent_match, c.agent))]
    return _rewarded(taken, spans)


def _failed(span: Span) -> bool:
    """A call of the gateway's that was refused or broke off: the agent was given nothing by it."""
    return CALL_ID in span.attributes and span.status.status_code == "ERROR"


def _is_call(span: Span, pattern: str | None) -> bool:
    if pattern is not None:
        return re.search(pattern, span.name) is not None
    a = span.attributes
    says = a.get("gen_ai.operation.name") in ("chat", "text_completion") or a.get("openinference.span.kind") == "LLM"
    return says or CALL_ID in a or ("gen_ai.response.id" in a and "gen_ai.operation.name" not in a)


def _read(span: Span, asked: Span, by_id: Mapping[str, Span], known: Mapping[str, Conversation]) -> Conversation:
    """`asked`: the span that holds the call's input, itself or that of the response's first choice."""
    a = span.attributes
    parent = known.get(a.get(PARENT_CALL_ID, ""))
    before = [*parent.messages, *([parent.answer] if parent.answer else [])] if parent else []
    answers = _messages(a.get("gen_ai.output.messages")) or _numbered(a, "gen_ai.completion")
    tools = _json(asked.attributes.get("gen_ai.tool.definitions"), []) or _numbered_tools(asked.attributes)
    return Conversation(
        span=span,
        call_id=a.get(CALL_ID),
        response_id=a.get("gen_ai.response.id"),
        parent_call_id=a.get(PARENT_CALL_ID),
        agent=agent_of(span, by_id),
        messages=[
            *before,
            *(_messages(asked.attributes.get("gen_ai.input.messages")) or _numbered(a, "gen_ai.prompt")),
        ],
        answer=answers[0] if answers else None,
        tools=tools or (parent.tools if parent else ()),
        prompt_ids=_first(a, _PROMPT_IDS),
        response_ids=_first(a, _RESPONSE_IDS),
    )


def agent_of(span: Span, by_id: Mapping[str, Span]) -> str | None:
    """The agent that a span belongs to: what it or the nearest span around it says. A workflow's step around them names
    it first; what the gateway recorded stands.
    """
    at: Span | None = span
    found: str | None = None
    for _ in range(len(by_id) + 1):
        if at is None or (found and CALL_ID in span.attributes):
            break
        if at.attributes.get(EXECUTOR_ID):
            return str(at.attributes[EXECUTOR_ID])
        found = found or _named(at)
        at = by_id.get(at.parent_id or "")
    return found


def _named(span: Span) -> str | None:
    for name in AGENT_NAMES:
        if span.attributes.get(name):
            return str(span.attributes[name])
    return span.name if any(span.attributes.get(key) == kind for key, kind in _AGENT_KINDS) else None


def _merged(best: Conversation, rest: Conversation) -> Conversation:
    """The gateway's record of a call, with what a framework knows besides."""
    return replace(
        best,
        agent=best.agent or rest.agent,
        prompt_ids=best.prompt_ids or rest.prompt_ids,
        response_ids=best.response_ids or rest.response_ids,
    )


def _rewarded(calls: Sequence[Conversation], spans: Sequence[Span]) -> list[Conversation]:
    own: dict[str, float] = {}
    for span in find_reward_spans(spans):
        if (named := span.attributes.get(REWARD_RESPONSE)) is not None:
            own[named] = own.get(named, 0.0) + (get_reward_value(span) or 0.0)
    whole = [s for s in spans if REWARD_RESPONSE not in s.attributes]
    final = find_final_reward(whole)
    last = {c.response_id or "": i for i, c in enumerate(calls)}
    rewards = [own.get(c.response_id or "") if last[c.response_id or ""] == i else None for i, c in enumerate(calls)]
    if calls and final is not None:
        rewards[-1] = final + (rewards[-1] or 0.0)
    return [replace(c, reward=r) for c, r in zip(calls, rewards, strict=True)]


def _messages(text: Any) -> list[Message]:
    return [_message(m) for m in _json(text, []) if isinstance(m, dict)]


def _message(shaped: Mapping[str, Any]) -> Message:
    """A message of the GenAI conventions in the form of OpenAI's chat completions."""
    message: Message = {"role": shaped.get("role", "user"), "content": ""}
    calls: list[Any] = []
    for part in shaped.get("parts", ()):
        match part.get("type"):
            case "text":
                message["content"] += part.get("content") or ""
            case "reasoning":
                message["reasoning_content"] = part.get("content")
            case "tool_call_response":
                result = part.get("response", part.get("result"))
                message["content"] = result if isinstance(result, str) else json.dumps(result)
                message["tool_call_id"] = part.get("id")
            case "tool_call":
                arguments = part.get("arguments")
                arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
                function = {"name": part.get("name"), "arguments": arguments}
                calls.append({"id": part.get("id"), "type": "function", "function": function})
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return message


def _numbered(attributes: Mapping[str, Any], prefix: str) -> list[Message]:
    """Messages as AgentOps and OpenLLMetry write them: `gen_ai.prompt.0.role`, `gen_ai.prompt.0.content`, …"""
    found: list[Message] = []
    for index in count():
        at = f"{prefix}.{index}"
        keys = {key[len(at) + 1 :]: value for key, value in attributes.items() if key.startswith(f"{at}.")}
        if not keys:
            return found
        role = "assistant" if prefix == "gen_ai.completion" else "user"
        message: Message = {"role": keys.get("role") or role, "content": keys.get("content", "")}
        if "tool_call_id" in keys:
            message["tool_call_id"] = keys["tool_call_id"]
        if calls := _numbered_calls(keys):
            message |= {"content": message["content"] or None, "tool_calls": calls}
        found.append(message)
    raise AssertionError("count() has no end")


def _numbered_calls(keys: Mapping[str, Any]) -> list[Any]:
    calls: list[Any] = []
    for index in count():
        name = keys.get(f"tool_calls.{index}.name", keys.get(f"tool_calls.{index}.function.name"))
        if name is None:
            return calls
        arguments = keys.get(f"tool_calls.{index}.arguments", keys.get(f"tool_calls.{index}.function.arguments", "{}"))
        function = {"name": name, "arguments": arguments}
        calls.append({"id": keys.get(f"tool_calls.{index}.id"), "type": "function", "function": function})
    raise AssertionError("count() has no end")


def _numbered_tools(attributes: Mapping[str, Any]) -> list[Any]:
    """The tools of a request as AgentOps and OpenLLMetry write them: `gen_ai.request.functions.0.name`, …"""
    tools: list[Any] = []
    for index in count():
        at = next((f"{prefix}.{index}" for prefix in _FUNCTIONS if f"{prefix}.{index}.name" in attributes), None)
        if at is None:
            return tools
        told = {key: attributes.get(f"{at}.{key}") for key in ("name", "description")}
        told["parameters"] = _json(attributes.get(f"{at}.parameters"), None)
        function = {key: value for key, value in told.items() if value is not None}
        tools.append({"type": "function", "function": function})
    raise AssertionError("count() has no end")


def _json(text: Any, default: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else default
    except ValueError:
        return default


def _first(attributes: Mapping[str, Any], names: Sequence[str]) -> Sequence[int] | None:
    for name in names:
        value = attributes.get(name)
        if value is not None:
            return [int(x) for x in (json.loads(value) if isinstance(value, str) else value)]
    return None
