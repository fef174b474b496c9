"""Users' text never becomes control tokens: what an agent reads cannot end a turn, begin one or speak for another role.

Tokenizers find their special tokens wherever the text of one stands. So a seam, a character that no text has, is put
inside each such text before messages are rendered, and where there is a seam the tokenizer's `encode` goes on anew: the
text comes out as it is, in ordinary tokens. Nothing depends on how a renderer or a template puts the prompt together.

Control tokens are all that the tokenizer calls special, and others of the form `<|…|>`. The marks of reasoning and tool
calls (`<think>`, `<tool_call>`, …) that a tokenizer does not call special stay what they are in the words of agents and
of their developers, who prompt with them, and are mere text in tool results. A token of a single character cannot be
split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agentlightning.rendering.messages import Message, Tool

SEAM = "\ufdd0"
"""A noncharacter of Unicode, which is not for the interchange of text."""

_BARRED = re.compile(r"<[|｜].*[|｜]>")
_MARK = re.compile(r"</?[a-z_]+>")


class ControlTokens:
    """Knows a tokenizer's control tokens by their texts. `added`: its added tokens, and whether each is special."""

    def __init__(self, added: Mapping[str, bool]) -> None:
        control = [text for text, special in added.items() if len(text) > 1 and (special or _BARRED.fullmatch(text))]
        marks = [text for text, special in added.items() if not special and _MARK.fullmatch(text)]
        self.texts: frozenset[str] = frozenset(control)
        self._control = _starts(control)
        self._all = _starts([*control, *marks])

    def as_text(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> tuple[list[Message], Any]:
        """Messages and tools whose texts, once rendered, hold no control tokens."""
        found = [self._message(message) for message in messages]
        if not tools or not self._control.search(msgspec.json.encode(tools).decode()):
            return found, list(tools) if tools else None
        return found, self._split_in(list(tools), self._control)

    def in_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Other values that a template may write."""
        return {name: self._split_in(value, self._control) for name, value in values.items()}

    def _message(self, message: Message) -> Message:
        pattern = self._all if message["role"] == "tool" else self._control
        changed: Message = {}
        for name, value in message.items():
            if name == "role":
                continue
            # An id is the same text in the answer that calls and in the result.
            new = self._split_in(value, self._control if name == "tool_call_id" else pattern)
            if name == "tool_calls" and new:
                new = [self._unescaped(call) for call in new]
            if new != value:
                changed[name] = new
        return {**message, **changed} if changed else message

    def _split_in(self, value: Any, pattern: re.Pattern[str]) -> Any:
        return _mapped(value, lambda text: self._split(text, pattern))

    def _unescaped(self, call: dict[str, Any]) -> dict[str, Any]:
        """The call without escapes in its arguments that hide a control token: many formats write them decoded."""
        function = call["function"]
        if "\\" not in function["arguments"]:
            return call
        try:
            # As the formats do it: this takes NaN and numbers without bounds, too.
            arguments = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            return call
        split = self._split_in(arguments, self._control)
        if split is arguments:
            return call
        text = json.dumps(split, ensure_ascii=False).encode("utf-8", "replace").decode()
        return {**call, "function": {**function, "arguments": text}}

    def _split(self, text: str, pattern: re.Pattern[str]) -> str:
        if SEAM in text:
            text = text.replace(SEAM, "\ufffd")
        return pattern.sub(lambda found: found[0] + SEAM, text)


def _starts(texts: Sequence[str]) -> re.Pattern[str]:
    """The first character of each of these texts, also where they overlap."""
    rests: dict[str, list[str]] = {}
    for text in sorted(texts):
        rests.setdefault(text[0], []).append(re.escape(text[1:]))
    return re.compile("|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()) or r"(?!)")


def _mapped(value: Any, change: Any) -> Any:
    """The value with all texts in it changed; itself if none was."""
    if isinstance(value, str):
        new = change(value)
        return value if new == value else new
    if isinstance(value, dict):
        items = {_mapped(key, change): _mapped(inner, change) for key, inner in value.items()}
        return items if any(key not in items or items[key] is not value[key] for key in value) else value
    if isinstance(value, list | tuple):
        parts = [_mapped(inner, change) for inner in value]
        return parts if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    return value
