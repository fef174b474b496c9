"""Anthropic's `context_management`: parts of a conversation that a request wants cleared before the model sees it.

The edits are those of the API. Tokens are estimated from characters: what is cleared is decided before anything is
tokenised. Pure; the messages that came are never mutated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from agentlightning.gateway.dialects.fields import Reading, typed
from agentlightning.gateway.dialects.tables.messages import EDITS
from agentlightning.gateway.exchange import Refusal

CLEARED = "[Old tool result content cleared]"
_CHARACTERS_PER_TOKEN = 4
_TRIGGER = 100_000
_KEPT_USES = 3
_KEPT_TURNS = 1
_WHERE = "context_management"
_THOUGHTS = ("thinking", "redacted_thinking")


class Cleared(NamedTuple):
    """A conversation after its edits, and what an answer tells of those that did something."""

    messages: Sequence[Any]
    applied: list[dict[str, Any]]


def cleared(body: Mapping[str, Any], messages: Sequence[Any], reading: Reading) -> Cleared:
    """The messages of a request after the edits that it asks for. Raises `Refusal` for an edit that makes no sense."""
    applied: list[dict[str, Any]] = []
    for index, edit in enumerate(typed(typed(body, _WHERE, dict, {}), "edits", list, [])):
        where = f"{_WHERE}.edits[{index}]"
        match reading.known(edit, EDITS, where):
            case "clear_tool_uses_20250919":
                messages, counts = _without_tool_uses(body, messages, edit, where)
            case "clear_thinking_20251015":
                messages, counts = _without_thinking(messages, edit, where)
            case _:
                continue
        applied += [{"type": edit["type"], **counts}] if counts else []
    return Cleared(messages, applied)


def _without_thinking(
    messages: Sequence[Any], edit: Mapping[str, Any], where: str
) -> tuple[Sequence[Any], Mapping[str, int] | None]:
    keep = edit.get("keep")
    if keep == "all" or (isinstance(keep, dict) and keep.get("type") == "all"):
        return messages, None
    kept = _amount(edit, "keep", "thinking_turns", _KEPT_TURNS, where)
    turns = [at for at, m in enumerate(messages) if any(b.get("type") in _THOUGHTS for b in _blocks(m))]
    gone = set(turns[: max(0, len(turns) - kept)])
    if not gone:
        return messages, None
    changed, tokens = list(messages), 0
    for at in gone:
        blocks = [b for b in messages[at]["content"] if not (isinstance(b, dict) and b.get("type") in _THOUGHTS)]
        tokens += _tokens(messages[at]["content"]) - _tokens(blocks)
        changed[at] = {**messages[at], "content": blocks}
    return changed, {"cleared_thinking_turns": len(gone), "cleared_input_tokens": max(0, tokens)}


def _without_tool_uses(
    body: Mapping[str, Any], messages: Sequence[Any], edit: Mapping[str, Any], where: str
) -> tuple[Sequence[Any], Mapping[str, int] | None]:
    spared = typed(edit, "exclude_tools", list, [])
    uses = {str(b.get("id")): str(b.get("name")) for m in messages for b in _blocks(m) if b.get("type") == "tool_use"}
    if not _is_due(body, messages, edit, len(uses), where):
        return messages, None
    kept = _amount(edit, "keep", "tool_uses", _KEPT_USES, where)
    meant = [use for use, name in list(uses.items())[: max(0, len(uses) - kept)] if name not in spared]
    inputs = edit.get("clear_tool_inputs")
    named = set(inputs) if isinstance(inputs, list) else set(uses.values()) if inputs else set[str]()
    gone = {use: uses[use] in named for use in meant}
    changed = [_with_cleared(message, gone) for message in messages]
    touched = sum(1 for old, new in zip(messages, changed, strict=True) if old is not new)
    tokens = max(0, _tokens(list(messages)) - _tokens(changed))
    if not touched or tokens < _amount(edit, "clear_at_least", "input_tokens", 0, where):
        return messages, None
    return changed, {"cleared_tool_uses": len(gone), "cleared_input_tokens": tokens}


def _is_due(body: Mapping[str, Any], messages: Sequence[Any], edit: Mapping[str, Any], uses: int, where: str) -> bool:
    """Whether the conversation is as long as the edit waits for."""
    if typed(edit, "trigger", dict, {}).get("type") == "tool_uses":
        return uses > _amount(edit, "trigger", "tool_uses", 0, where)
    most = _amount(edit, "trigger", "input_tokens", _TRIGGER, where)
    return _tokens([list(messages), body.get("system"), body.get("tools")]) > most


def _with_cleared(message: Any, gone: Mapping[str, bool]) -> Any:
    """The message without the results of the calls that are `gone`, and without the inputs of those marked so."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    blocks = [_cleared_block(block, gone) for block in content]
    same = all(old is new for old, new in zip(content, blocks, strict=True))
    return message if same else {**message, "content": blocks}


def _cleared_block(block: Any, gone: Mapping[str, bool]) -> Any:
    if not isinstance(block, dict):
        return block
    if block.get("type") == "tool_result" and str(block.get("tool_use_id")) in gone:
        return block if block.get("content") == CLEARED else {**block, "content": CLEARED}
    if block.get("type") == "tool_use" and gone.get(str(block.get("id"))) and block.get("input"):
        return {**block, "input": {}}
    return block


def _blocks(message: Any) -> list[Mapping[str, Any]]:
    """The blocks of an assistant's message."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return []
    content = message.get("content")
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _amount(edit: Mapping[str, Any], name: str, kind: str, default: int, where: str) -> int:
    """The number in a field of the form {"type": kind, "value": number}."""
    given = typed(edit, name, dict, {})
    value = typed(given, "value", int, default)
    if value < 0 or given.get("type", kind) != kind:
        param = f"{where}.{name}"
        raise Refusal(f"'{param}' must be a number of {kind}.", code="invalid_value", param=param)
    return value


def _tokens(value: Any) -> int:
    return len(msgspec.json.encode(value)) // _CHARACTERS_PER_TOKEN
