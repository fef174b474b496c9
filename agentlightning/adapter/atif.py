"""Spans and calls of an attempt → a trajectory in ATIF, the Agent Trajectory Interchange Format (version 1.8). Pure.

The tree of calls becomes chains: a call, the first call that continues it, and so on. The chain that began first is the
trajectory. Every other one is embedded in it: a sub-agent's is referred to by the step during which it began; one
that branched off begins with copied context. So no sampled token is in two steps that are not marked as copies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from agentlightning.adapter.conversations import Conversation, Message, conversations
from agentlightning.types import Span
from agentlightning.types.call import Call

VERSION = "ATIF-v1.8"
_SOURCES = {"system": "system", "developer": "system", "user": "user"}
_DATA_URL = re.compile(r"data:(image/[a-z]+)")
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
Step = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Chain:
    """Calls of which each continues the one before."""

    calls: tuple[Conversation, ...]
    parent: Conversation | None
    """The call that the first one continues, where another call continues that, too."""

    @property
    def began(self) -> float:
        return self.calls[0].span.start_time or 0.0


def trajectory_of(
    spans: Sequence[Span], calls: Sequence[Call], *, session_id: str, trajectory_id: str, extra: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The trajectory of an attempt as JSON has it; None where it has no answered call.

    Args:
        spans: All of the attempt's.
        calls: Its calls with their tokens.
        session_id: What the trajectory and those embedded in it have in common: the rollout.
        trajectory_id: The trajectory's own: the attempt.
        extra: What the format has no place for: rewards, outcome, task.
    """
    found = [c for c in conversations(spans) if c.answer is not None]
    if not found:
        return None
    by_id = {call.info.call_id: call for call in calls}
    chains = _chains(found)
    names = {id(chain): trajectory_id if n == 0 else f"{trajectory_id}/{n}" for n, chain in enumerate(chains)}
    written = {id(chain): _steps(chain, by_id) for chain in chains}
    main, *others = chains
    embedded = [_embedded(chain, main, chains, names, written, session_id) for chain in others]
    steps = written[id(main)]
    whole = {
        "schema_version": VERSION,
        "session_id": session_id,
        "trajectory_id": trajectory_id,
        "agent": _agent(main, by_id),
        "steps": steps,
        "final_metrics": _totals([*steps, *(step for one in embedded for step in one["steps"])], len(steps)),
        "extra": dict(extra),
    }
    return whole | ({"subagent_trajectories": embedded} if embedded else {})


def _chains(found: Sequence[Conversation]) -> list[_Chain]:
    """In the order in which they began."""
    next_of: dict[str, Conversation] = {}
    for call in found:
        if call.parent_call_id is not None:
            next_of.setdefault(call.parent_call_id, call)
    by_id = {call.call_id: call for call in found}
    continued = {id(call) for parent, call in next_of.items() if parent in by_id}
    chains: list[_Chain] = []
    for call in found:
        if id(call) in continued:
            continue
        chain = [call]
        while (later := next_of.get(chain[-1].call_id or "")) is not None:
            chain.append(later)
        chains.append(_Chain(tuple(chain), by_id.get(call.parent_call_id) if call.parent_call_id else None))
    return sorted(chains, key=lambda chain: chain.began)


def _steps(chain: _Chain, by_id: Mapping[str, Call]) -> list[Step]:
    """The messages and answers of a chain. Results of tools are observations of the step that called them."""
    steps: list[Step] = []
    parent, seen = chain.parent, 0
    copied = len(parent.messages) + 1 if parent is not None else 0
    for call in chain.calls:
        for number, message in enumerate(call.messages[seen:], seen):
            _add(steps, message, copied=number < copied)
        steps.append(_answer(call, by_id.get(call.call_id or "")))
        seen = len(call.messages) + 1  # and its answer
    return [{"step_id": number, **step} for number, step in enumerate(steps, 1)]


def _add(steps: list[Step], message: Message, *, copied: bool) -> None:
    """A message of a prompt."""
    mark = {"is_copied_context": True} if copied else {}
    content = _content(message.get("content"))
    if message["role"] == "tool":
        if not steps or steps[-1]["source"] != "agent":
            steps.append({"source": "user", "message": content, **mark})
            return
        called = {c["tool_call_id"] for c in steps[-1].get("tool_calls", ())}
        which = message.get("tool_call_id")
        result = {"source_call_id": which} if which in called else {}
        steps[-1].setdefault("observation", {"results": []})["results"].append({**result, "content": content})
    elif message["role"] == "assistant":  # one that no call of this attempt sampled, or that was rewritten
        steps.append({"source": "agent", **_step_of(message), "is_copied_context": True})
    else:
        steps.append({"source": _SOURCES.get(message["role"], "user"), "message": content, **mark})


def _answer(conversation: Conversation, call: Call | None) -> Step:
    assert conversation.answer is not None
    began = conversation.span.start_time
    step: Step = {"source": "agent", **_step_of(conversation.answer), "llm_call_count": 1}
    if began:
        step["timestamp"] = datetime.fromtimestamp(began, UTC).isoformat()
    if call is None:
        return step
    prompt, response = call.prompt_ids.tolist(), call.response_ids.tolist()
    versions = [{"start": run.start, "version": run.version} for run in call.versions]
    return {
        **step,
        "model_name": call.info.model,
        "metrics": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(response),
            "prompt_token_ids": prompt,
            "completion_token_ids": response,
            **({"logprobs": call.logprobs.tolist()} if len(call.logprobs) == len(response) else {}),
            "extra": {"temperature": call.info.temperature, "weight_versions": versions},
        },
        "extra": {"call_id": call.info.call_id, "trained": call.info.trained, "finish_reason": call.info.finish_reason},
    }


def _step_of(message: Message) -> Step:
    """What an assistant's message says and calls."""
    body: Step = {"message": _content(message.get("content"))}
    if message.get("reasoning_content"):
        body["reasoning_content"] = message["reasoning_content"]
    calls = [_tool_call(call, number) for number, call in enumerate(message.get("tool_calls") or ())]
    return body | ({"tool_calls": calls} if calls else {})


def _tool_call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        read = None
    known = {"tool_call_id": call.get("id") or f"call-{number}", "function_name": function.get("name") or ""}
    if isinstance(read, dict):
        return {**known, "arguments": read}
    return {**known, "arguments": {}, "extra": {"arguments": arguments}}  # which are no object


def _content(content: Any) -> str | list[dict[str, Any]]:
    """Text, or parts of which some are images."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts = [part for given in content if (part := _part(given)) is not None]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(given: Any) -> dict[str, Any] | None:
    if given.get("type") == "text":
        return {"type": "text", "text": given.get("text") or ""}
    url = (given.get("image_url") or {}).get("url")
    if not isinstance(url, str):
        return None
    found = _DATA_URL.match(url)
    kind = found[1] if found and found[1] in _IMAGES else "image/png"
    return {"type": "image", "source": {"media_type": kind, "path": url}}


def _embedded(
    chain: _Chain,
    main: _Chain,
    chains: Sequence[_Chain],
    names: Mapping[int, str],
    written: Mapping[int, list[Step]],
    session_id: str,
) -> dict[str, Any]:
    """A chain beside the main one, to which the step refers during which it began."""
    extra: dict[str, Any] = {}
    if chain.parent is not None:
        origin = next(one for one in chains if any(call is chain.parent for call in one.calls))
        extra = {"branched_from": names[id(origin)], "call_id": chain.parent.call_id}
    elif (during := _step_during(chain, main, written[id(main)])) is not None:
        reference = {"trajectory_id": names[id(chain)], "session_id": session_id}
        results = during.setdefault("observation", {"results": []})["results"]
        if not results:
            results.append({"content": ""})
        results[-1].setdefault("subagent_trajectory_ref", []).append(reference)
    else:
        extra = {"began_after": names[id(main)]}
    return {
        "schema_version": VERSION,
        "session_id": session_id,
        "trajectory_id": names[id(chain)],
        "agent": _agent(chain, {}),
        "steps": written[id(chain)],
        **({"extra": extra} if extra else {}),
    }


def _step_during(chain: _Chain, main: _Chain, steps: Sequence[Step]) -> Step | None:
    """The main chain's step whose answer had been given, and not yet its next, when the chain began; None after all."""
    answers = [step for step in steps if step.get("llm_call_count")]
    before = [n for n, call in enumerate(main.calls) if (call.span.end_time or 0.0) <= chain.began]
    if not before or before[-1] == len(main.calls) - 1:
        return None
    return answers[before[-1]]


def _agent(chain: _Chain, by_id: Mapping[str, Call]) -> dict[str, Any]:
    first = chain.calls[0]
    call = by_id.get(first.call_id or "")
    tools = [dict(tool) for tool in first.tools if isinstance(tool, Mapping)]
    return {
        "name": first.agent or "agent",
        "version": "unknown",
        **({"model_name": call.info.model} if call is not None else {}),
        **({"tool_definitions": tools} if tools else {}),
    }


def _totals(steps: Sequence[Step], own: int) -> dict[str, Any]:
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    return {
        "total_prompt_tokens": sum(one["prompt_tokens"] for one in metrics),
        "total_completion_tokens": sum(one["completion_tokens"] for one in metrics),
        "total_steps": own,
    }
