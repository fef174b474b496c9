"""What a renderer is tried on before it is trusted with a model."""

from __future__ import annotations

from typing import Any

from agentlightning.rendering.messages import Message, Tool

_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
PROBE_TOOLS: tuple[Tool, ...] = (_TOOL,)
_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_USER: Message = {"role": "user", "content": "Add one to 2."}
_ASKS: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
}
_RESULT: Message = {"role": "tool", "content": "3", "tool_call_id": "call00001", "name": "add"}
_ANSWER: Message = {"role": "assistant", "content": "It is 3."}

_PROBES: tuple[tuple[list[Message], list[Tool] | None], ...] = (
    ([_USER], None),
    ([_SYSTEM, _USER], None),
    ([_SYSTEM, _USER, _ANSWER, _USER], None),
    ([_USER], [_TOOL]),
    ([_SYSTEM, _USER], [_TOOL]),
    ([_SYSTEM, _USER, _ASKS, _RESULT], [_TOOL]),
)


def agrees(renderer: Any, tokenizer: Any) -> bool:
    """Whether a renderer gives the chat template's tokens on every probe that the template accepts, and on most of
    them.
    """
    from jinja2 import TemplateError

    agreed = 0
    for messages, tools in _PROBES:
        try:
            wanted = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
        except (TemplateError, TypeError, ValueError):
            continue
        try:
            got = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
        except (AssertionError, TemplateError, ValueError, KeyError, TypeError, AttributeError):
            return False
        if list(got) != list(wanted):
            return False
        agreed += 1
    return agreed > len(_PROBES) // 2


def tools_survive(renderer: Any) -> bool:
    """Whether a tool call that was rendered is read back as the same call."""
    from jinja2 import TemplateError

    wanted = [("add", {"a": 2}, "ok")]
    try:
        prompt = list(renderer.render_ids([_USER], tools=[_TOOL], add_generation_prompt=False))
        prompt = list(renderer.render_ids([_USER], tools=[_TOOL], add_generation_prompt=True))
        whole = list(renderer.render_ids([_USER, _ASKS], tools=[_TOOL], add_generation_prompt=False))
        # A response begins where the prompt ends; where the prompt begins it otherwise (GPT-OSS: with a thought), the
        # whole turn is read.
        for start in (_common(prompt, whole), _common(prompt, whole)):
            parsed = renderer.parse_response(whole[start:], tools=[_TOOL], prompt_ids=whole[:start])
            if [(c.name, c.arguments, c.status) for c in parsed.tool_calls] == wanted:
                return True
    except (AssertionError, TemplateError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return False


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
