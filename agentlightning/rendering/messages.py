"""Messages and tools in neutral form: that of OpenAI's chat completions, reduced to what a chat template can say.

A message has `role`, `content` (always a string), `tool_calls`, `tool_call_id`, `name`, `reasoning_content`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]


def with_tool_names(messages: Sequence[Message]) -> list[Message]:
    """Messages whose tool results say which tool they are of, as some chat formats write; most clients leave it out."""
    names: dict[str, str] = {}
    found: list[Message] = []
    for message in messages:
        names.update((call["id"], call["function"]["name"]) for call in message.get("tool_calls", ()))
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message = {**message, "name": names[message["tool_call_id"]]}
        found.append(message)
    return found
