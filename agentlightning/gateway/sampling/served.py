"""What of a request the chat format of its model can do. The rest is left out, and told. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from agentlightning.errors import ModelError
from agentlightning.gateway.exchange import CallRequest, TemplateArgument, unsupported
from agentlightning.rendering import Rendering
from agentlightning.types.call import LeftOut

_SWITCHES = ("enable_thinking", "thinking")
"""How chat formats call the argument that switches thoughts off."""
_NO_SCORES = "the engine of this model returns no log-probs of prompt tokens"
NO_THOUGHT = "none"
"""The effort of a request that wants no thoughts."""


def as_served(request: CallRequest, rendering: Rendering, *, scores_prompts: bool = True) -> CallRequest:
    """The request without what its model's chat format or its engine cannot do and an answer can do without.

    Raises `Refusal` where it cannot.
    """
    arguments, left_out = _arguments(request, rendering)
    if not scores_prompts and request.scores_prompt is not None:
        if request.echo and request.logprobs:
            raise unsupported("echo", f"{_NO_SCORES}; ask without 'logprobs', or without 'echo'.")
        left_out.append(LeftOut("prompt_logprobs", _NO_SCORES, "unavailable"))
        request = msgspec.structs.replace(request, prompt_logprobs=None)
    several = request.parallel_tool_calls or not _ends_after_a_call(request, rendering)
    if several and not request.parallel_tool_calls:
        why = f"with the renderer '{rendering.name}' nothing ends an answer after its first call"
        left_out.append(LeftOut("parallel_tool_calls", why, "unavailable"))
    if not _holds_to_some(request, rendering):
        why = f"with the renderer '{rendering.name}' a model that may answer otherwise is held to no tools"
        left_out.append(LeftOut("tool_choice", why, "unavailable"))
    if not arguments and not left_out:
        return request
    return msgspec.structs.replace(
        request, arguments=arguments, parallel_tool_calls=several, left_out=(*request.left_out, *left_out)
    )


def _ends_after_a_call(request: CallRequest, rendering: Rendering) -> bool:
    if not request.tools or request.tool_choice.mode == "required":
        return True
    return rendering.markers is not None and rendering.markers.tool_close is not None


def _holds_to_some(request: CallRequest, rendering: Rendering) -> bool:
    """Whether a model that may call some of the tools, and need not, is kept from calling the others."""
    choice = request.tool_choice
    if not choice.among or choice.mode == "required" or request.schema is not None:
        return True
    return rendering.call_grammar(request.tools or [], in_reasoning=False, required=False, several=True) is not None


def _arguments(request: CallRequest, rendering: Rendering) -> tuple[dict[str, Any], list[LeftOut]]:
    """The arguments that the chat format has, with values that it takes."""
    arguments: dict[str, Any] = {}
    left_out: list[LeftOut] = []
    if request.prompt is not None:
        return arguments, [_left_out(one, "a raw prompt goes through no chat template") for one in request.template]
    for one in request.template:
        found, why = _taken(one, rendering)
        arguments.update(found)
        if why is not None:
            left_out.append(_left_out(one, why))
    return arguments, left_out


def _taken(one: TemplateArgument, rendering: Rendering) -> tuple[dict[str, Any], str | None]:
    """What of an argument the chat format takes, and why nothing of it, if so."""
    if one.name in rendering.arguments:
        try:
            rendering.with_arguments({one.name: one.value})
        except ModelError as error:
            why = str(error)
        else:
            return {one.name: one.value}, None
    else:
        why = "the model's chat template has no such argument"
    if one.hint and one.value == NO_THOUGHT:
        switches = {name: False for name in _SWITCHES if name in rendering.arguments}
        if switches:
            return switches, None
    return {}, why


def _left_out(one: TemplateArgument, why: str) -> LeftOut:
    return LeftOut(one.param, why, "harmless" if one.hint else "unavailable")
