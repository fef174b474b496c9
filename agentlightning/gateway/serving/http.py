"""Small parts of HTTP over ASGI: reading a body, sending one, and noticing that the client went away."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from agentlightning.gateway.exchange import Refusal
from agentlightning.gateway.limits import RequestLimits
from agentlightning.types.call import LeftOut

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

Headers = Sequence[tuple[bytes, bytes]]

_MOST_NAMES = 16
KEY_HEADERS = (b"authorization", b"x-api-key", b"x-goog-api-key")
"""Where OpenAI's, Anthropic's and Google's clients send their key."""
_REQUEST_IDS = (b"x-request-id", b"request-id")
"""OpenAI's and Anthropic's. Those of a provider that answered are left as they are."""
_JSON = (b"content-type", b"application/json")


class DisconnectedError(Exception):
    """The client went away while it was still sending its request."""


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """The headers of a request, by lower-case name. A key that stands in the query, as Google's API has it, is one."""
    headers = dict(scope["headers"])
    if b"key=" in scope["query_string"] and not any(name in headers for name in KEY_HEADERS):
        key = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get("key", "")
        headers[b"x-goog-api-key"] = key.encode("latin-1", "replace")
    return headers


def api_key(headers: Mapping[bytes, bytes]) -> str:
    """The API key as OpenAI's clients send it, or as Anthropic's or Google's do."""
    bearer = headers.get(b"authorization", b"").decode("latin-1")
    if bearer[:7].lower() == "bearer ":
        return bearer[7:].strip()
    return (headers.get(b"x-api-key") or headers.get(b"x-goog-api-key", b"")).decode("latin-1")


async def read_body(
    receive: Receive, seconds: float, limits: RequestLimits, declared: bytes | None, hold: Callable[[int], None]
) -> bytes:
    """The request's body, of `declared` length; `hold` counts what has come.

    Raises `Refusal` if it is too large, or not there after `seconds`.
    """
    limits.check_length(declared)
    try:
        async with asyncio.timeout(seconds):
            return await _read_body(receive, limits, hold)
    except TimeoutError:
        raise Refusal(
            f"The request's body did not come within {seconds:g} seconds.", status=408, code="body_timeout"
        ) from None


async def _read_body(receive: Receive, limits: RequestLimits, hold: Callable[[int], None]) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise DisconnectedError
        part = message.get("body", b"")
        size += len(part)
        try:
            if size > limits.body_bytes:
                raise limits.too_large()
            hold(len(part))
        except Refusal:
            if message.get("more_body", False):
                await drain(receive)
            raise
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def drain(receive: Receive) -> None:
    """Read on in a body that is refused, piece by piece, while others have their turns. What nobody reads the server
    takes in at once, megabytes at a time.
    """
    while (message := await receive())["type"] != "http.disconnect" and message.get("more_body"):
        pass


async def cancel_when_gone(receive: Receive, work: asyncio.Task[Any]) -> None:
    """A client that hangs up ends the sampling of its answer."""
    while (await receive())["type"] != "http.disconnect":
        pass
    work.cancel()


def left_out_header(left_out: Sequence[LeftOut]) -> Headers:
    """The header that names what of a request has no effect and was perhaps meant to have one; none if nothing."""
    names = [one.field for one in left_out if one.kind != "harmless"]
    if not names:
        return ()
    more = f", +{len(names) - _MOST_NAMES}" if len(names) > _MOST_NAMES else ""
    return ((b"x-agl-left-out", (", ".join(names[:_MOST_NAMES]) + more).encode("ascii", "replace")),)


def with_request_id(send: Send) -> Send:
    """Name the request in the headers of its answer, as OpenAI's and Anthropic's clients look for it in reports."""
    name = f"req_{uuid.uuid4().hex}".encode()

    async def named(message: Any) -> None:
        if message["type"] == "http.response.start":
            own = (*message["headers"],)
            if not any(key.lower() in _REQUEST_IDS for key, _ in own):
                message = {**message, "headers": [*own, *((key, name) for key in _REQUEST_IDS)]}
        await send(message)

    return named


async def send_json(send: Send, status: int, body: Any, headers: Headers = ()) -> None:
    await send_body(send, status, msgspec.json.encode(body), headers)


async def send_body(send: Send, status: int, body: bytes, more: Headers = ()) -> None:
    headers = [_JSON, (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_part(send: Send, part: bytes) -> None:
    if part:
        await send({"type": "http.response.body", "body": part, "more_body": True})
