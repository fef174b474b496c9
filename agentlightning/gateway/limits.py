"""What one request may be at most, so that no request holds up those of other agents. Normal agents meet none of it.

A request that goes beyond is refused with a 4xx that names the limit.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from agentlightning.arguments import explained_class
from agentlightning.errors import ConfigError
from agentlightning.gateway.exchange import Refusal
from agentlightning.net.backoff import FACTOR

T = TypeVar("T")

_SMALL_BYTES = 128 * 1024
_FEW_ELEMENTS = 2048
"""Up to these a body is read on the event loop; it takes a few milliseconds."""
_BLOCK = 2**16
_background = ThreadPoolExecutor(2, thread_name_prefix="agl-gateway-large")
"""For what takes long and mostly without the interpreter: large requests wait for each other, and no other waits."""


@explained_class
@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """How large one request may be, and how many an attempt may have open."""

    body_bytes: int = 16 * 2**20
    """The body as it comes."""
    elements: int = 100_000
    """Values in the body's lists and objects, all levels together."""
    containers: int = 20_000
    """Lists and objects in the body: each takes as long to decode as a hundred numbers."""
    stop_strings: int = 64
    stop_characters: int = 4096
    """Of all stop strings of a request together."""
    open_requests: int = 1024
    """Requests of one attempt that are being answered at the same time."""
    waiting_bytes: int = 64 * 2**20
    """Bodies of one attempt, together, that are coming in or wait to be read."""
    schema_bytes: int = 512 * 1024
    """Of the JSON schemas that a response must follow, together: that of the answer, and those of tools whose arguments
    are held to them."""
    schema_seconds: float = 10.0
    """How long making the grammar of such schemas may take, without the time that it waits for others."""
    large_seconds: float = 60.0
    """How long reading a large request may take, and how long tokenising it; without the time that it waits for others.
    """
    history_messages: int = 16_384
    """Messages of an attempt's conversations that are held in memory, for each model. What was not used for longest
    leaves first, and is read back from the store when a request goes on from it."""
    history_bytes: int = 32 * 2**20
    """Their tokens and texts."""
    history_total_bytes: int = 2**30
    """The same and stateful conversations, of all attempts together. Of the attempt that holds most leaves first what
    was not used for longest."""
    refused_wait: float = FACTOR
    """How many times as long as refusing a request took the attempt's next one waits, at most half a minute; requests
    that come meanwhile are read one after another."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) >= 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")

    def check_length(self, declared: bytes | None) -> None:
        """Refuse a body whose header says that it is too large, before any of it is read."""
        if declared is not None and declared.isdigit() and int(declared[:20]) > self.body_bytes:
            raise self.too_large()

    def too_large(self) -> Refusal:
        return Refusal(
            f"The request body is larger than {self.body_bytes / 2**20:g} MiB (body_bytes).",
            status=413,
            code="body_too_large",
        )

    def check_stops(self, stops: tuple[str, ...]) -> None:
        """Refuse more stop strings than allowed; they are kept with every choice."""
        if len(stops) > self.stop_strings or sum(map(len, stops)) > self.stop_characters:
            raise Refusal(
                f"The request's stop strings go beyond a limit: at most {self.stop_strings} (stop_strings) of together "
                f"{self.stop_characters} characters (stop_characters).",
                code="too_many_stop_strings",
                param="stop",
            )

    def is_large(self, body: bytes) -> bool:
        """Whether reading this body would hold up others."""
        if len(body) > _SMALL_BYTES:
            return True
        # Commas and brackets inside of texts count here too, so this is the most there can be.
        most = body.count(b",") + body.count(b"[") + body.count(b"{")
        return most > min(_FEW_ELEMENTS, self.elements, self.containers)


def checked(body: bytes | bytearray, limits: RequestLimits) -> dict[str, Any]:
    """The JSON object in a body that may be large. Raises `Refusal`, before decoding it if there is too much in it."""
    elements, containers = _elements(body, limits.elements)
    if elements > limits.elements:
        raise _too_many(f"more than {limits.elements} values in its lists and objects (elements)")
    if containers > limits.containers:
        raise _too_many(f"more than {limits.containers} lists and objects (containers)")
    return decode(body)


class Waiting:
    """The bytes of each attempt's bodies that are coming in or wait to be read."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._held: Counter[Hashable] = Counter()

    def hold(self, owner: Hashable, size: int) -> None:
        """Count bytes that have come. Raises `Refusal`, and counts none, if they are too many."""
        if self._held[owner] + size > max(self._limits.waiting_bytes, self._limits.body_bytes):
            raise Refusal(
                f"This attempt's requests that wait to be read are larger than "
                f"{self._limits.waiting_bytes / 2**20:g} MiB together (waiting_bytes). Try again.",
                status=429,
                kind="rate_limit_error",
                code="too_many_requests",
            )
        self._held[owner] += size

    def release(self, owner: Hashable, size: int) -> None:
        self._held[owner] -= size
        if not self._held[owner]:
            del self._held[owner]


def decode(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in a body. Raises `Refusal` if there is none."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:  # the last for what is no UTF-8
        raise Refusal(f"The request body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(found, dict):
        raise Refusal("The request body must be a JSON object.", code="invalid_json")
    return found


def _too_many(what: str) -> Refusal:
    return Refusal(f"The request body has {what}.", status=413, code="too_many_elements")


def _elements(body: bytes | bytearray, enough: int) -> tuple[int, int]:
    """Commas and opening brackets outside of texts, and the brackets alone; stops counting once there are more than
    `enough`.
    """
    commas, brackets, inside, at = 0, 0, False, 0
    while at < len(body) and commas + brackets <= enough:
        end = at + _BLOCK
        while end < len(body) and body[end - 1] == ord("\\"):  # an escape stays in one block
            end += 1
        parts = body[at:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[inside::2])
        commas += outside.count(b",")
        brackets += outside.count(b"[") + outside.count(b"{")
        inside, at = inside ^ (len(parts) % 2 == 0), end
    return commas + brackets, brackets


async def in_background(function: Callable[..., T], *arguments: Any) -> T:
    """The result of a function that runs beside the event loop, after other large work."""
    return await asyncio.get_running_loop().run_in_executor(_background, _yielding, function, *arguments)


_SWITCH_SECONDS = 0.0005
_yielding_now = 0
_usual_switch = sys.getswitchinterval()
_lock = threading.Lock()


def _yielding(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function; meanwhile the event loop gets the interpreter back within half a millisecond, ten times sooner
    than it usually would.
    """
    _count_yielding(1)
    try:
        return function(*arguments)
    finally:
        _count_yielding(-1)


def _count_yielding(more: int) -> None:
    global _yielding_now, _usual_switch
    with _lock:
        if _yielding_now == 0:
            _usual_switch = sys.getswitchinterval()
        _yielding_now += more
        sys.setswitchinterval(_SWITCH_SECONDS if _yielding_now else _usual_switch)


_frozen = False


def freeze_heap() -> None:
    """Leave what the process has loaded out of garbage collection, once: a request of many values makes it run, and
    looking through a large heap takes as long as many answers.
    """
    global _frozen
    if not _frozen:
        _frozen = True
        gc.collect()
        gc.freeze()
