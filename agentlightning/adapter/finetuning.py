"""Spans → lines of a file that a fine-tuning service accepts, in the form that the service documents. Pure.

`openai`    `{"messages": […], "tools": […]}` as in chat completions: an answer has content or tool calls, whose
            arguments are JSON texts and whose ids their results name; the last message is the assistant's. Azure and
            Fireworks read the same.
`together`  the same, but there is no role `developer`, a conversation begins with `system` or `user`, and two messages
            of a user do not follow each other.
`mistral`   as mistral-finetune checks it: an answer has content or tool calls and not both, ids of tool calls have nine
            letters or digits, a tool has a description, there is one system message. Of a conversation with tools only
            the last answer is learned there, so each of its answers becomes the end of a line of its own.

Reasoning is in none of them. What a format cannot hold (pictures, an answer without content and calls) is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from agentlightning.adapter.messages import TraceToMessages
from agentlightning.types import Span

Example = dict[str, Any]
"""A line: `messages`, and `tools` where there are any."""
Message = dict[str, Any]


def fine_tuning_examples(
    spans: Sequence[Span], form: str = "openai", *, agent_match: str | None = None
) -> list[Example]:
    """The conversations of one attempt, as lines in the form of `FORMATS[form]`.

    agent_match: a regular expression; only conversations of agents whose name it finds something in.
    """
    return fine_tuning_lines(TraceToMessages(agent_match).adapt(spans), form)


def fine_tuning_lines(examples: Sequence[Example], form: str = "openai") -> list[Example]:
    """Conversations as lines in the form of `FORMATS[form]`. One that teaches nothing is left out: it ends without an
    answer, or the result of a tool follows no call."""
    whole = [_plain(example) for example in examples]
    return [line for example in whole if _teaches(example) for line in FORMATS[form](example)]


def to_jsonl(examples: Sequence[Example]) -> str:
    """A line of JSON each."""
    return "".join(json.dumps(e, ensure_ascii=False) + "\n" for e in examples)


def _openai(example: Example) -> list[Example]:
    return [example]


def _together(example: Example) -> list[Example]:
    messages: list[Message] = []
    for message in (_as_system(m) for m in example["messages"]):
        if messages and message["role"] == messages[-1]["role"] == "user":
            messages[-1] = {**message, "content": f"{messages[-1]['content']}\n\n{message['content']}"}
        else:
            messages.append(message)
    begins = messages[0]["role"] in ("system", "user")
    return [{**example, "messages": messages}] if begins else []


def _mistral(example: Example) -> list[Example]:
    messages = [_nine_letters(_as_system(m)) for m in example["messages"]]
    system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
    kept = [m if not m.get("tool_calls") else {k: v for k, v in m.items() if k != "content"} for m in messages]
    rest = [m for m in kept if m["role"] != "system"]
    whole = [{"role": "system", "content": system}, *rest] if system else rest
    if "tools" not in example:
        return [{"messages": whole}]
    tools = [{**t, "function": {"description": "", "parameters": {}, **t["function"]}} for t in example["tools"]]
    ends = [n for n, m in enumerate(whole, 1) if m["role"] == "assistant"]
    return [{"messages": whole[:n], "tools": tools} for n in ends]


FORMATS: Mapping[str, Callable[[Example], list[Example]]] = {
    "openai": _openai,
    "together": _together,
    "mistral": _mistral,
}


# ---- what all of them share ------------------------------------------------------------------------------------------


def _plain(example: Example) -> Example:
    """With texts as contents, an id on every tool call, and tools in the form of chat completions."""
    messages = list(_messages(example["messages"]))
    tools = [_tool(t) for t in example.get("tools", ())]
    return {"messages": messages, **({"tools": tools} if tools else {})}


def _messages(messages: Sequence[Message]) -> Iterator[Message]:
    waiting: list[str] = []
    for number, message in enumerate(messages):
        plain: Message = {"role": message["role"]}
        content = message.get("content")
        if content or not message.get("tool_calls"):
            plain["content"] = content if isinstance(content, str) else _text(content)
        if message.get("tool_calls"):
            plain["tool_calls"] = [_call(c, f"{number}-{n}") for n, c in enumerate(message["tool_calls"])]
            waiting = [c["id"] for c in plain["tool_calls"]]
        if message["role"] == "tool":
            given = message.get("tool_call_id")
            plain["tool_call_id"] = given or (waiting[0] if waiting else "")
            waiting = [w for w in waiting if w != plain["tool_call_id"]]
        if "weight" in message:
            plain["weight"] = message["weight"]
        yield plain


def _call(call: Mapping[str, Any], otherwise: str) -> Message:
    function = call["function"]
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    named = {"name": function["name"], "arguments": text}
    return {"id": call.get("id") or f"call-{otherwise}", "type": "function", "function": named}


def _tool(tool: Mapping[str, Any]) -> Message:
    function = tool.get("function", {k: v for k, v in tool.items() if k != "type"})
    return {"type": "function", "function": dict(function)}


def _text(content: Any) -> str:
    parts = content if isinstance(content, list) else []
    return "".join(p.get("text", "") for p in parts if isinstance(p, dict))


def _teaches(example: Example) -> bool:
    """Whether it ends with an answer that says or does something, and every tool's result follows its call."""
    last = example["messages"][-1]
    called: set[str] = set()
    for message in example["messages"]:
        if message["role"] == "tool" and message["tool_call_id"] not in called:
            return False
        called |= {c["id"] for c in message.get("tool_calls", ())}
    return last["role"] == "assistant" and bool(last.get("content") or last.get("tool_calls"))


def _as_system(message: Message) -> Message:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _nine_letters(message: Message) -> Message:
    changed = dict(message)
    if "tool_call_id" in message:
        changed["tool_call_id"] = _short(message["tool_call_id"])
    if "tool_calls" in message:
        changed["tool_calls"] = [{**c, "id": _short(c["id"])} for c in message["tool_calls"]]
    return changed


def _short(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:9]
