"""Answers, streams and errors of the Gemini API. Pure.

An answer holds what its client is to send back: the reasoning as a signature, and the arguments of calls as an object.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import msgspec

from agentlightning.gateway.dialects.base import sse
from agentlightning.gateway.exchange import Answer, CallRequest, Choice, Delta, Refusal, ToolCall
from agentlightning.rendering import Rendering

_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    410: "CANCELLED",
    429: "RESOURCE_EXHAUSTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
}


class Writer:
    """Answers in pieces: events, or the elements of one JSON array. The last tells why it ends, and the tokens."""

    def __init__(self, request: CallRequest, response_id: str, rendering: Rendering) -> None:
        self._request = request
        self._rendering = rendering
        self._tail = tail_of(request, response_id)
        self._begun = False

    def start(self, prompt_tokens: int) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        parts: list[dict[str, Any]] = []
        if delta.reasoning and self._request.private["thoughts"]:
            parts.append({"text": delta.reasoning, "thought": True})
        if delta.content:
            parts.append({"text": delta.content})
        extra = _logprobs(self._request, delta, self._rendering)
        if not parts and not extra:
            return b""
        content = {"role": "model", "parts": parts or [{"text": ""}]}
        return self._piece({"candidates": [{"content": content, "index": delta.index, **extra}], **self._tail})

    def choice(self, choice: Choice) -> bytes:
        return b""  # its end comes with the tokens, which are known once all choices are whole

    def finish(self, reply: Answer) -> bytes:
        ends = [
            {"content": {"role": "model", "parts": _last_parts(choice)}, **_end(choice)} for choice in reply.choices
        ]
        usage = usage_of(len(reply.prompt_ids), reply.cached_tokens, reply.choices, self._rendering)
        last = self._piece({"candidates": ends, "usageMetadata": usage, **self._tail})
        return last if self._request.private["sse"] else last + b"]"

    def fail(self, refusal: Refusal) -> bytes:
        last = self._piece(error_of(refusal))
        return last if self._request.private["sse"] else last + b"]"

    def _piece(self, value: Any) -> bytes:
        if self._request.private["sse"]:
            return sse(value)
        before, self._begun = b",\n" if self._begun else b"[", True
        return before + msgspec.json.encode(value)


def tail_of(request: CallRequest, response_id: str) -> dict[str, Any]:
    return {"modelVersion": request.model, "responseId": response_id}


def candidate_of(request: CallRequest, choice: Choice, rendering: Rendering) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    if choice.reasoning and request.private["thoughts"]:
        parts.append({"text": choice.reasoning, "thought": True})
    if choice.content:
        parts.append({"text": choice.content})
    last = _last_parts(choice)
    if choice.content and not choice.tool_calls:
        parts[-1] |= _signature_of(choice)
        last = []
    content = {"role": "model", "parts": [*parts, *last]}
    return {"content": content, **_end(choice), **_logprobs(request, choice, rendering)}


def _last_parts(choice: Choice) -> list[dict[str, Any]]:
    """The calls, or a part without text; the first is signed. Clients take an answer without parts for none."""
    parts: list[dict[str, Any]] = [_call(call) for call in choice.tool_calls] or [{"text": ""}]
    parts[0] |= _signature_of(choice)
    return parts


def _call(call: ToolCall) -> dict[str, Any]:
    return {"functionCall": {"id": call.id, "name": call.name, "args": _wrapped(call.arguments)}}


def _end(choice: Choice) -> dict[str, Any]:
    reason = "MAX_TOKENS" if choice.finish_reason == "length" else "STOP"
    return {"finishReason": reason, "index": choice.index}


def usage_of(prompt: int, cached: int, choices: Sequence[Choice], rendering: Rendering) -> dict[str, int]:
    response = sum(len(choice.ids) for choice in choices)
    thoughts = sum(min(len(c.ids), len(rendering.encode(c.reasoning))) for c in choices if c.reasoning)
    return {
        "promptTokenCount": prompt,
        "candidatesTokenCount": response - thoughts,
        "totalTokenCount": prompt + response,
        **({"thoughtsTokenCount": thoughts} if thoughts else {}),
        **({"cachedContentTokenCount": cached} if cached else {}),
    }


def _logprobs(request: CallRequest, tokens: Choice | Delta, rendering: Rendering) -> dict[str, Any]:
    if not request.logprobs or tokens.ids is None or tokens.logprobs is None or not len(tokens.ids):
        return {}
    pairs = zip(tokens.ids.tolist(), tokens.logprobs.tolist(), strict=True)
    chosen = [_token(rendering, token, logprob) for token, logprob in pairs]
    result: dict[str, Any] = {"chosenCandidates": chosen, "logProbabilitySum": float(tokens.logprobs.sum())}
    if request.top_logprobs and tokens.top_ids is not None and tokens.top_logprobs is not None:
        rows = zip(tokens.top_ids.tolist(), tokens.top_logprobs.tolist(), strict=True)
        result["topCandidates"] = [
            {"candidates": [_token(rendering, i, p) for i, p in zip(ids, logprobs, strict=True)]}
            for ids, logprobs in rows
        ]
    return {"logprobsResult": result, "avgLogprobs": float(tokens.logprobs.mean())}


def _token(rendering: Rendering, token: int, logprob: float) -> dict[str, Any]:
    return {"token": rendering.token_text(token), "tokenId": token, "logProbability": max(logprob, -9999.0)}


def error_of(refusal: Refusal) -> dict[str, Any]:
    """Google's error shape."""
    status = _STATUSES.get(refusal.status, "INTERNAL" if refusal.status >= 500 else "INVALID_ARGUMENT")
    error: dict[str, Any] = {"code": refusal.status, "message": refusal.message, "status": status}
    if refusal.wire_code is not None:
        field = {"metadata": {"field": refusal.param}} if refusal.param is not None else {}
        info = {
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": refusal.wire_code,
            "domain": "agentlightning",
        }
        error["details"] = [{**info, **field}]
    return {"error": error}


_SIGNED = b"agentlightning:"


def _signature_of(choice: Choice) -> dict[str, str]:
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


def _wrapped(arguments: str) -> dict[str, Any]:
    """A call's arguments as the object that this format asks for; anything else is wrapped, so that nothing is lost."""
    try:
        args = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        args = arguments
    return args if isinstance(args, dict) else {_WRAPPED: args}


def unwrapped(args: Any) -> Any:
    """The arguments that `_wrapped` was given."""
    return args[_WRAPPED] if isinstance(args, dict) and args.keys() == {_WRAPPED} else args
