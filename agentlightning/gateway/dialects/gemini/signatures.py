"""What an answer holds for its client to send back: the reasoning as a signature, arguments as an object. Pure."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from agentlightning.gateway.exchange import Choice

_SIGNED = b"agentlightning:"


def signature_of(choice: Choice) -> dict[str, str]:
    """The reasoning for clients to send back, as they do with Google's own, also where they keep no thoughts."""
    if not choice.reasoning:
        return {}
    return {"thoughtSignature": base64.b64encode(_SIGNED + choice.reasoning.encode()).decode()}


def reasoning_in(signature: Any) -> str | None:
    """The reasoning in a signature of ours; there is none in those of others."""
    if not isinstance(signature, str):
        return None
    try:
        found = base64.urlsafe_b64decode(signature.replace("+", "-").replace("/", "_"))
        return found.removeprefix(_SIGNED).decode() if found.startswith(_SIGNED) else None
    except (binascii.Error, ValueError):
        return None


_WRAPPED = "_arguments"


def wrapped(arguments: str) -> dict[str, Any]:
    """A call's arguments as the object that this format asks for; anything else is wrapped, so that nothing is lost."""
    try:
        args = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        args = arguments
    return args if isinstance(args, dict) else {_WRAPPED: args}


def unwrapped(args: Any) -> Any:
    """What `wrapped` made this of."""
    return args[_WRAPPED] if isinstance(args, dict) and args.keys() == {_WRAPPED} else args
