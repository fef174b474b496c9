"""The one place that makes our HTTP clients. None follows a redirect, and none takes an answer without end.

Requests carry keys, and what comes back goes to agents: a server that answers with another address would get both the
keys, at a host of its choosing, and the answers of hosts that only this machine reaches. What is read as a whole, and
not piece by piece, is read up to a size, and up to a time.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import aiohttp

from agentlightning.reading import MOST_BYTES, within_depth

LARGE = 2**30
"""The size of an answer from servers that are part of a run: a store's, a vLLM's."""
ANSWER_SECONDS = 600.0
"""From the head of an answer that is read as a whole to its end, however steadily it comes."""


class UnwantedAnswer(aiohttp.ClientError):
    """The server answers with another address, which is not asked, or with too much. To ask again does not help."""


class _Answer(aiohttp.ClientResponse):
    most = MOST_BYTES

    async def read(self) -> bytes:
        if self._body is None:
            limit = asyncio.timeout(ANSWER_SECONDS)
            try:
                async with limit:
                    self._body = await self._whole()
            except TimeoutError:
                if not limit.expired():
                    raise
                self.close()
                raise UnwantedAnswer(f"its answer did not end within {ANSWER_SECONDS:g} s of its beginning") from None
        return self._body

    async def _whole(self) -> bytes:
        found = bytearray()
        async for piece in self.content.iter_any():
            found += piece
            if len(found) > self.most:
                self.close()
                raise UnwantedAnswer(f"its answer has more than {self.most:,} bytes, and is not read to its end")
        return bytes(found)

    async def json(self, **settings: Any) -> Any:
        """Raises ValueError, also where it is nested too deeply to be read."""
        with within_depth():
            return await super().json(**settings)


def reason_of(error: Exception) -> str:
    """Why a request was not answered, in words that name the address and nothing of the client."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"there is no host {error.host}"
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
        return f"nothing listens at {error.host}:{error.port}"
    if isinstance(error, TimeoutError):
        return "no answer came in time"
    return str(error) or type(error).__name__


def http_session(*, most: int = MOST_BYTES, **settings: Any) -> aiohttp.ClientSession:
    """A session with aiohttp's settings, whose requests raise `UnwantedAnswer` where they would be redirected, and
    where an answer that is read as a whole has more than `most` bytes."""
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_refuse)
    return aiohttp.ClientSession(
        trace_configs=[trace], response_class=type("Answer", (_Answer,), {"most": most}), **settings
    )


async def _refuse(
    session: aiohttp.ClientSession, context: SimpleNamespace, found: aiohttp.TraceRequestRedirectParams
) -> None:
    found.response.close()
    raise UnwantedAnswer(
        f"it answers {found.response.status} with another address, and redirects are not followed, because they would "
        "take the key along. Give the address that it leads to"
    )
