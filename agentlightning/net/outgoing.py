"""The one place that makes our HTTP clients. None follows a redirect.

Requests carry keys, and what comes back goes to agents: a server that answers with another address would get both the
keys, at a host of its choosing, and the answers of hosts that only this machine reaches.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import aiohttp


class RedirectError(aiohttp.ClientError):
    """The server answers with another address, which is not asked."""


def reason_of(error: Exception) -> str:
    """Why a request was not answered, in words that name the address and nothing of the client."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"there is no host {error.host}"
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
        return f"nothing listens at {error.host}:{error.port}"
    if isinstance(error, TimeoutError):
        return "no answer came in time"
    return str(error) or type(error).__name__


def http_session(**settings: Any) -> aiohttp.ClientSession:
    """A session with aiohttp's settings, whose requests raise `RedirectError` where they would be redirected."""
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_refuse)
    return aiohttp.ClientSession(trace_configs=[trace], **settings)


async def _refuse(
    session: aiohttp.ClientSession, context: SimpleNamespace, found: aiohttp.TraceRequestRedirectParams
) -> None:
    found.response.close()
    raise RedirectError(
        f"it answers {found.response.status} with another address, and redirects are not followed, because they would "
        "take the key along. Give the address that it leads to"
    )
