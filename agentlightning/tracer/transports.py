"""Instruments the HTTP libraries that model clients use, so that their requests are attributed: httpx, httpx2, aiohttp.

openai's and anthropic's clients send by httpx or httpx2, litellm and others by aiohttp, DSPy by a library of its own.
What is wrapped is the one method through which each library sends a request, and `ThreadPoolExecutor.submit`, which
then carries the context into the pool. Libraries that are not installed are left out; DSPy, which is slow to import,
is instrumented if it is loaded.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from agentlightning.keys import redacted
from agentlightning.tracer.attribution import AgentName, attribute

_DSPYS = "dspy._vendor.lm15.transports"
_wrapped: list[tuple[type, str, Callable[..., Any]]] = []
"""Class, method name, and the method as it was."""


def instrument(agent_name: AgentName) -> None:
    """Wrap what is installed. Repeating it wraps what was loaded since. `agent_name` tells whose code is running."""
    if not _wrapped:
        _instrument_installed(agent_name)
    loaded = sys.modules.get(_DSPYS)
    if loaded is not None and not any(owner.__module__.startswith(_DSPYS) for owner, _, _ in _wrapped):
        for name in ("StdlibTransport", "StdlibAsyncTransport"):
            transport = vars(loaded).get(name, object)
            if "stream" in vars(transport):  # another version of DSPy may send in another way
                _wrap(transport, "stream", lambda stream: _lm15(stream, agent_name))


def _instrument_installed(agent_name: AgentName) -> None:
    for name in ("httpx", "httpx2"):
        if find_spec(name) is not None:
            module = import_module(name)
            logging.getLogger(name).addFilter(_without_keys)
            _wrap(module.Client, "send", lambda send: _httpx(send, agent_name))
            _wrap(module.AsyncClient, "send", lambda send: _httpx(send, agent_name))
    if find_spec("aiohttp") is not None:
        _wrap(import_module("aiohttp").ClientSession, "_request", lambda request: _aiohttp(request, agent_name))
    _wrap(ThreadPoolExecutor, "submit", _in_context)


def uninstrument() -> None:
    """Put everything back."""
    while _wrapped:
        owner, name, original = _wrapped.pop()
        setattr(owner, name, original)
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).removeFilter(_without_keys)


def _without_keys(record: logging.LogRecord) -> bool:
    """These libraries log the URL of each request, and an attempt's URL has its key in it."""
    record.msg, record.args = redacted(record.getMessage()), ()
    return True


def _wrap(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = owner.__dict__[name]
    setattr(owner, name, functools.wraps(original)(make(original)))
    _wrapped.append((owner, name, original))


def _httpx(send: Callable[..., Any], agent_name: AgentName) -> Callable[..., Any]:
    """For the sync client and the async one: the request is changed before the call, whichever way it is awaited."""

    def wrapper(self: Any, request: Any, **options: Any) -> Any:
        found = attribute(str(request.url), request.url.raw_path.decode("ascii"), request.headers, agent_name)
        if found is not None:
            request.url = type(request.url)(found.origin + found.path)
            request.headers.update({**found.headers, "host": request.url.netloc.decode("ascii")})
        return send(self, request, **options)

    return wrapper


def _aiohttp(request: Callable[..., Any], agent_name: AgentName) -> Callable[..., Any]:
    async def wrapper(self: Any, method: str, str_or_url: Any, **options: Any) -> Any:
        url = self._build_url(str_or_url)
        given = self._prepare_headers(options.get("headers"))
        found = attribute(str(url), url.raw_path_qs, {k.lower(): v for k, v in given.items()}, agent_name)
        if found is None:
            return await request(self, method, str_or_url, **options)
        given.update(found.headers)
        return await request(
            self, method, type(url)(found.origin + found.path, encoded=True), **{**options, "headers": given}
        )

    return wrapper


def _lm15(stream: Callable[..., Any], agent_name: AgentName) -> Callable[..., Any]:
    """For DSPy's sync transport and its async one."""

    def wrapper(self: Any, request: Any) -> Any:
        given = {name.lower(): value for name, value in request.headers}
        parts = urlsplit(request.url)
        path = f"{parts.path}?{parts.query}" if parts.query else parts.path
        found = attribute(request.url, path, given, agent_name)
        if found is None:
            return stream(self, request)
        others = [(name, value) for name, value in request.headers if name.lower() not in found.headers]
        headers = [*others, *found.headers.items()]
        return stream(self, dataclasses.replace(request, url=found.origin + found.path, headers=headers))

    return wrapper


def _in_context(submit: Callable[..., Any]) -> Callable[..., Any]:
    """Always, in an attempt's context or in none: what a pool's thread knew before must not count."""

    def wrapper(self: Any, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        return submit(self, contextvars.copy_context().run, fn, *args, **options)

    return wrapper
