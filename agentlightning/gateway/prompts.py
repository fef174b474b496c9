"""Prompts that the gateway puts into the requests of an agent that cannot be edited: system prompts, tools' texts,
demonstrations.

They are resources of the rollout (`Injected`), so a prompt optimiser tunes them like any other template.
Requests are changed as they came, before anything reads or forwards them. Pure; a body is never mutated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentlightning.types import Demonstrations, NamedResources, SystemPrompt, ToolDescription

Injected = SystemPrompt | ToolDescription | Demonstrations
KINDS: Mapping[str, type[Injected]] = {
    "system": SystemPrompt,
    "tool": ToolDescription,
    "demonstrations": Demonstrations,
}
"""By the name that a kind has where prompts are sent to another process."""
Body = Mapping[str, Any]
Edit = Callable[[str], str]
_SYSTEM = ("system", "developer")


def prompts_in(resources: NamedResources) -> tuple[Injected, ...]:
    """The prompts that the gateway has to put in, in the order of their names."""
    return tuple(r for _, r in sorted(resources.items()) if isinstance(r, Injected))


def with_prompts(dialect: str, body: Body, prompts: Sequence[Injected], agent: str | None) -> dict[str, Any]:
    """The request with these prompts, as far as they are for this agent and its wire format has a place for them."""
    changed = dict(body)
    for prompt in prompts:
        if prompt.agent is not None and (agent is None or not re.search(prompt.agent, agent)):
            continue
        if isinstance(prompt, ToolDescription):
            if changed.get("tools"):
                changed["tools"] = [_described(tool, prompt) for tool in changed["tools"]]
        elif isinstance(prompt, Demonstrations):
            changed = _demonstrated(dialect, changed, prompt.messages)
        elif prompt.template and dialect in _PLACES:
            changed = _PLACES[dialect](changed, _edit(prompt))
    return changed


def _edit(prompt: SystemPrompt) -> Edit:
    text = prompt.template
    ways: dict[str, Edit] = {
        "replace": lambda _: text,
        "before": lambda old: f"{text}\n\n{old}" if old else text,
        "after": lambda old: f"{old}\n\n{text}" if old else text,
    }
    return ways[prompt.how]


def _in_messages(body: dict[str, Any], edit: Edit) -> dict[str, Any]:
    """OpenAI's chat completions: the first system or developer message; one is added where there is none."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return body
    return {**body, "messages": _edited_first(messages, edit) or [{"role": "system", "content": edit("")}, *messages]}


def _in_responses(body: dict[str, Any], edit: Edit) -> dict[str, Any]:
    """OpenAI's responses: `instructions`, or the first system or developer item of the input."""
    given = body.get("input")
    if not body.get("instructions") and isinstance(given, list) and (edited := _edited_first(given, edit)):
        return {**body, "input": edited}
    return {**body, "instructions": edit(_text(body.get("instructions")))}


def _in_system(body: dict[str, Any], edit: Edit) -> dict[str, Any]:
    """Anthropic's messages: `system`, a text or blocks of text; the last block's cache mark is kept."""
    system = body.get("system")
    if isinstance(system, list) and system and isinstance(system[-1], dict):
        return {**body, "system": [{**system[-1], "text": edit(_text(system))}]}
    return {**body, "system": edit(_text(system))}


def _in_system_instruction(body: dict[str, Any], edit: Edit) -> dict[str, Any]:
    """Google's Gemini API: `systemInstruction`, a text or a content of parts."""
    name = "system_instruction" if "system_instruction" in body else "systemInstruction"
    given = body.get(name)
    old = _text(given.get("parts") if isinstance(given, dict) else given)
    return {**body, name: {"parts": [{"text": edit(old)}]}}


_PLACES: Mapping[str, Callable[[dict[str, Any], Edit], dict[str, Any]]] = {
    "chat": _in_messages,
    "responses": _in_responses,
    "messages": _in_system,
    "gemini": _in_system_instruction,
}
"""Where the system prompt is, by the dialect's name."""


def _edited_first(messages: Sequence[Any], edit: Edit) -> list[Any] | None:
    for at, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") in _SYSTEM:
            return [*messages[:at], {**message, "content": edit(_text(message.get("content")))}, *messages[at + 1 :]]
    return None


def _demonstrated(dialect: str, body: dict[str, Any], turns: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The turns behind the system messages that the conversation begins with. One that the server continues from an
    earlier response had them there.
    """
    names = {"chat": "messages", "messages": "messages", "responses": "input", "gemini": "contents"}
    name = names.get(dialect)
    if name is None or body.get("previous_response_id") or body.get("conversation"):
        return body
    given = body.get(name)
    messages = [{"role": "user", "content": given}] if isinstance(given, str) and name == "input" else given
    if not turns or not isinstance(messages, list):
        return body
    at = next((i for i, m in enumerate(messages) if not (isinstance(m, dict) and m.get("role") in _SYSTEM)), None)
    start = len(messages) if at is None else at
    added = [_content(turn) if dialect == "gemini" else dict(turn) for turn in turns]
    return {**body, name: [*messages[:start], *added, *messages[start:]]}


def _content(turn: Mapping[str, str]) -> dict[str, Any]:
    """A turn as the Gemini API has it."""
    return {"role": "model" if turn["role"] == "assistant" else "user", "parts": [{"text": turn["content"]}]}


def _text(content: Any) -> str:
    """The text of a content that is one, or consists of parts."""
    if isinstance(content, list):
        return "\n\n".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _described(tool: Any, prompt: ToolDescription) -> Any:
    """A tool with another description, if it is the one; all forms in which tools are declared."""
    if not isinstance(tool, dict):
        return tool
    for name in ("functionDeclarations", "function_declarations"):
        if isinstance(tool.get(name), list):
            return {**tool, name: [_described(one, prompt) for one in tool[name]]}
    inner = tool.get("function")
    if isinstance(inner, dict):
        return (
            {**tool, "function": {**inner, "description": prompt.template}}
            if inner.get("name") == prompt.tool
            else tool
        )
    return {**tool, "description": prompt.template} if tool.get("name") == prompt.tool else tool
