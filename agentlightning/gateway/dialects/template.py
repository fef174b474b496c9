"""What a request wants of the model's chat template: arguments by their names, and how much is to be thought.

Values are data: bounded JSON, whose texts become no control tokens. Which of them act is the chat format's to say
(`sampling.served`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from agentlightning.gateway.dialects.fields import Reading, typed
from agentlightning.gateway.dialects.tables.common import THINKING
from agentlightning.gateway.exchange import Refusal, TemplateArgument

_MOST, _LARGEST = 32, 8192
"""Arguments of a request, and the bytes of all together as JSON."""
_EFFORT, _NONE = "reasoning_effort", "none"


def template_of(body: Mapping[str, Any], reading: Reading) -> tuple[TemplateArgument, ...]:
    """The arguments in a request of OpenAI's chat, with the fields of vLLM, SGLang and the makers of models."""
    given = typed(body, "chat_template_kwargs", dict, {})
    if len(given) > _MOST or len(msgspec.json.encode(given)) > _LARGEST:
        raise Refusal(
            f"'chat_template_kwargs' may hold {_MOST} arguments and {_LARGEST:,} bytes.",
            code="invalid_value",
            param="chat_template_kwargs",
        )
    switch = body.get("enable_thinking")
    return (
        *effort_of(body, _EFFORT, _EFFORT),
        *thinking_of(body, reading),
        *([] if switch is None else [TemplateArgument("enable_thinking", switch, "enable_thinking")]),
        *(TemplateArgument(name, value, f"chat_template_kwargs.{name}") for name, value in given.items()),
    )


def effort_of(body: Mapping[str, Any], name: str, param: str) -> tuple[TemplateArgument, ...]:
    """How much is to be thought, in OpenAI's words."""
    effort = typed(body, name, str, "").lower()
    return (TemplateArgument(_EFFORT, effort, param, hint=True),) if effort else ()


def thinking_of(body: Mapping[str, Any], reading: Reading) -> tuple[TemplateArgument, ...]:
    """Anthropic's `thinking`, which others have taken over: off is an effort of none, anything else says nothing."""
    thinking = typed(body, "thinking", dict, {})
    reading.check(thinking, THINKING, "thinking")
    if thinking.get("type") == "disabled":
        return (no_thought("thinking"),)
    if thinking:
        reading.harmless("thinking")
    return ()


def no_thought(param: str) -> TemplateArgument:
    return TemplateArgument(_EFFORT, _NONE, param, hint=True)
