"""Text that known programs put into their system prompts and that is not for the model: it is left out.

It changes from call to call, and stands before everything else, so that no two conversations of a program would share
their beginning, nor one conversation with itself after it was compacted. Nothing is left out of the requests of
programs that have no row here, and whatever is left out is recorded. Pure; a body is never mutated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from agentlightning.gateway.dialects.base import Dialect
from agentlightning.gateway.exchange import CallRequest
from agentlightning.rendering.messages import Message
from agentlightning.types.call import LeftOut


@dataclass(frozen=True)
class _Rule:
    """What stands at the beginning of a part of the system prompt, by which the program is known."""

    program: str
    dialect: str
    name: str
    pattern: re.Pattern[str]

    @property
    def left_out(self) -> LeftOut:
        why = f"{self.program} writes it for its provider; it differs between calls, and is not for the model"
        return LeftOut(f"system.{self.name}", why, "harmless")


_RULES = (
    _Rule(
        "Claude Code",
        "messages",
        "x-anthropic-billing-header",
        re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*"),
    ),
)


def parse_stable(dialect: Dialect, body: Mapping[str, Any], answered: Mapping[str, Sequence[Message]]) -> CallRequest:
    """The request that a body asks, without such text. Raises `Refusal`."""
    found: list[LeftOut] = []
    for rule in _RULES:
        if rule.dialect == dialect.name and (system := _without(body.get("system"), rule.pattern)) is not None:
            body = {**body, "system": system}
            found.append(rule.left_out)
    request = dialect.parse(body, answered)
    return msgspec.structs.replace(request, left_out=(*request.left_out, *found)) if found else request


def _without(system: Any, pattern: re.Pattern[str]) -> str | list[Any] | None:
    """A system prompt, which is a text or blocks of text, without the pattern; None if it is not there."""
    if isinstance(system, str):
        return pattern.sub("", system, count=1) if pattern.match(system) else None
    if not isinstance(system, list) or not any(_text(block, pattern) is not None for block in system):
        return None
    changed = [(block, _text(block, pattern)) for block in system]
    return [block if text is None else {**block, "text": text} for block, text in changed if text != ""]


def _text(block: Any, pattern: re.Pattern[str]) -> str | None:
    """A block's text without the pattern; None if it has none of it."""
    text = block.get("text") if isinstance(block, Mapping) else None
    return pattern.sub("", text, count=1) if isinstance(text, str) and pattern.match(text) else None
