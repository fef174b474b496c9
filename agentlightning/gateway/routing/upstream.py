"""Other providers behind the gateway: a request goes on as it came, the answer comes back as it is, streams included.

Such calls are recorded as spans, with both bodies, and never trained: their tokens are the provider's. Nothing is
retried but a connection that could not be made; whatever was sent may have been answered.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from agentlightning.arguments import check_address
from agentlightning.errors import ConfigError
from agentlightning.gateway.attempts import LiveAttempt
from agentlightning.gateway.dialects import Dialect, DialectRoute
from agentlightning.gateway.exchange import Refusal
from agentlightning.gateway.limits import in_background
from agentlightning.gateway.recording.recorder import Recorder
from agentlightning.gateway.recording.records import Forwarded, Place, answer_in, forwarded_span, read_forwarded
from agentlightning.gateway.recording.refusals import record_refusal
from agentlightning.gateway.routing.spending import Account, RoutingSettings, SpendingLimits, TokenPrice, Usage
from agentlightning.keys import not_empty
from agentlightning.net.outgoing import http_session, reason_of
from agentlightning.net.places import Places
from agentlightning.types import Attributes, Span
from agentlightning.types.call import Spent

logger = logging.getLogger(__name__)

_CONNECT_TRIES = 3
_BUSY = (408, 429)
"""Statuses by which a provider says that it is its fault, like all from 500 on."""
_KEPT_BYTES = 2**20
"""How much of a response's body its span keeps."""


class Provider(RoutingSettings, frozen=True, kw_only=True):
    """Any server that speaks one of the gateway's wire formats."""

    base_url: str | tuple[str, ...]
    """With /v1 if the provider's paths have it, for example https://api.openai.com/v1. Of several replicas, all calls
    of a rollout go to the same one, whose cache knows its prefix."""
    api_key: str | None = None
    """The provider's own; agents never see it."""
    forward_client_key: bool = False
    """Without an `api_key`: send the key that the agent's client has of its own."""
    model: str | None = None
    """The model's name at the provider; the alias itself if None."""
    max_concurrency: int = 64
    """Calls at the same time; more wait, and the attempts that do take turns."""
    timeout_seconds: float = 600.0
    """For one call, and between two pieces of a stream."""
    headers: Mapping[str, str] = {}
    """Sent with every request."""
    extra_body: Mapping[str, Any] = {}
    """Fields put into every request that lacks them, for example {"return_token_ids": True} for vLLM, whose token ids
    are then on the calls' spans."""
    price: TokenPrice | None = None
    """With it the cost of every call is recorded, and what a run has spent is shown."""
    limits: SpendingLimits = SpendingLimits()
    """A call beyond one is refused, by its name. Limits of cost need a price."""

    def __post_init__(self) -> None:
        for url in self.base_url if isinstance(self.base_url, tuple | list) else (self.base_url,):
            check_address("The base_url of a Provider", url)
            if (ends := re.search(r"/(chat/completions|responses|messages|embeddings)/?$", url)) is not None:
                raise ConfigError(
                    f"The base_url of a Provider is {url!r}; clients add {ends[0]} themselves. Leave that out."
                )
        not_empty(self.api_key, "The api_key of a Provider")
        if self.price is None and (self.limits.cost is not None or self.limits.run_cost is not None):
            raise ConfigError("A limit of cost needs a price: Provider(price=TokenPrice(input=…, output=…), …).")


class Upstream:
    """One alias of a provider."""

    def __init__(self, alias: str, provider: Provider, recorder: Recorder, account: Account) -> None:
        self._alias = alias
        self._provider = provider
        self._recorder = recorder
        self.account = account
        urls = (provider.base_url,) if isinstance(provider.base_url, str) else provider.base_url
        self._urls = [url.rstrip("/") for url in urls]
        self._places = Places(provider.max_concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def forward(
        self,
        route: DialectRoute,
        body: Mapping[str, Any],
        live: LiveAttempt,
        place: Place,
        *,
        key: str | None = None,
        large: bool = False,
    ) -> AsyncIterator[tuple[int, list[tuple[bytes, bytes]], AsyncIterator[bytes]]]:
        """The provider's answer to a request: status, headers, and the body in pieces. Raises `Refusal`.

        `key` is the client's own, which goes on if the provider is to have it. A `large` request is written, and its
        record made, beside the event loop.
        """
        dialect = route.dialect
        sent = {**self._provider.extra_body, **body, "model": self._provider.model or self._alias}
        if self.account.counts_tokens:
            sent = dialect.asking_for_usage(sent)
        path, sent = dialect.addressed(route.path, sent)
        call = Forwarded(
            call_id=f"fwd-{uuid.uuid4().hex}:0",
            alias=self._alias,
            dialect=dialect.name,
            request=await in_background(_text, sent) if large else _text(sent),
            start=time.time(),
        )
        expected = await self._admit(live, place, call, dialect.settings(sent))
        kept = bytearray()
        error: str | None = "cut off"
        answers = not route.counting  # whose client goes away meanwhile may be charged nevertheless
        try:
            url = self._replica(live.rollout_id) + path
            own = key if self._provider.forward_client_key else None
            credentials = dialect.credentials(self._provider.api_key or own)
            async with self._places.one(live.key), await self._post(url, credentials, call.request) as response:
                answers = answers and response.status < 400
                yield response.status, _headers(response), _pieces(response, kept)
                error = None if response.status < 400 else f"the provider answered {response.status}"
                self._mark(live, response.status)
        except asyncio.CancelledError:
            error = live.ended or "the client disconnected"
            raise
        except (aiohttp.ClientError, TimeoutError) as failure:
            answers = answers and not isinstance(failure, aiohttp.ClientConnectorError)
            error = reason_of(failure)
            why = f"The provider of '{self._alias}' ({self._replica(live.rollout_id)}) did not answer: {error}."
            why += " Check its base URL, and that it runs." if isinstance(failure, aiohttp.ClientConnectorError) else ""
            live.mark_infra_error(why)
            raise Refusal(why, status=502, kind="server_error", code="upstream_error") from failure
        finally:
            self._record(live, place, call, _Exchange(dialect, sent, bytes(kept), answers, large), error)
            self.account.release(live, expected)

    def _mark(self, live: LiveAttempt, status: int) -> None:
        """What an answer that is an error says of the attempt's end."""
        if status < 400:
            live.count(forwarded=1)
        elif status in _BUSY or status >= 500:
            live.mark_infra_error(f"The provider of '{self._alias}' answered {status}.")
        elif status >= 400:
            why = f"The provider of '{self._alias}' answered {status}."
            live.mark_refused_by_provider(why + self._doubt(live, status))

    def _doubt(self, live: LiveAttempt, status: int) -> str:
        """The hint for a key that the provider refuses, and for a base URL where nothing is there."""
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return " Check the key that it is sent: api_key of its Provider, --api-key or --upstream-key."
        base = self._replica(live.rollout_id)
        if status != HTTPStatus.NOT_FOUND or urlsplit(base).path.rstrip("/").endswith("/v1"):
            return ""
        return f" Its base URL is {base}; that of most servers ends in /v1."

    async def _admit(self, live: LiveAttempt, place: Place, call: Forwarded, settings: Mapping[str, Any]) -> Spent:
        try:
            return await self.account.admit(live, settings, len(call.request))
        except Refusal as refusal:
            record_refusal(self._recorder, live, place, self._alias, refusal, call.start)
            raise

    def _replica(self, rollout_id: str) -> str:
        """The one that scores highest for this rollout: a replica more or less moves no rollouts between the others."""
        return max(self._urls, key=lambda url: hashlib.blake2b(f"{url} {rollout_id}".encode()).digest())

    async def _post(self, url: str, credentials: Mapping[str, str], body: str) -> aiohttp.ClientResponse:
        headers = {"content-type": "application/json", **credentials, **self._provider.headers}
        for number in range(1, _CONNECT_TRIES + 1):
            try:
                # A file is sent in pieces; a large text at once would hold up the other requests.
                return await self._client().post(url, data=io.BytesIO(body.encode()), headers=headers)
            except aiohttp.ClientConnectorError:
                if number == _CONNECT_TRIES:
                    raise
                await asyncio.sleep(0.1 * number)
        raise AssertionError("the loop returns or raises")

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            limit = self._provider.timeout_seconds
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=limit)
            self._session = http_session(connector=aiohttp.TCPConnector(limit=0), timeout=timeout, trust_env=True)
        return self._session

    def _record(
        self, live: LiveAttempt, place: Place, call: Forwarded, exchanged: _Exchange, error: str | None
    ) -> None:
        end = time.time()

        def settle() -> tuple[dict[str, Any], Attributes]:
            answer = answer_in(exchanged.dialect, exchanged.response)
            usage = Usage.reported(answer)
            if usage is None and exchanged.answers and self.account.counts_tokens:
                usage = Usage.guessed(call.request, exchanged.response)
            return answer, self.account.charge(live, usage or Usage())

        # The next call's limits depend on it, and a large record is made in another thread, which counts nothing.
        settled = settle() if self.account.counts_tokens or exchanged.large else None

        def draft() -> Span:
            answer, used = settled or settle()
            read = read_forwarded(exchanged.dialect, exchanged.request, answer)
            span = forwarded_span(live.rollout_id, live.attempt_id, place, call, exchanged.response, read, end, error)
            return span.model_copy(update={"attributes": {**span.attributes, **used}})

        self._recorder.put(live.key, draft, large=exchanged.large)


def _text(sent: Mapping[str, Any]) -> str:
    return msgspec.json.encode(sent).decode()


class _Exchange(NamedTuple):
    """What went both ways."""

    dialect: Dialect
    request: Mapping[str, Any]
    response: bytes
    answers: bool
    """Whether it is an answer, and no error."""
    large: bool


_PASSED = re.compile(r"retry-after(-ms)?|(x-)?request-id|(x|anthropic)-ratelimit-.*")
"""Headers that tell a client when to come back, and a provider which call it was."""


def _headers(response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    passed = [(name.lower(), value) for name, value in response.headers.items() if _PASSED.fullmatch(name.lower())]
    found = [("content-type", response.headers.get("content-type", response.content_type)), *passed]
    return [(name.encode("latin-1", "replace"), value.encode("latin-1", "replace")) for name, value in found]


async def _pieces(response: aiohttp.ClientResponse, kept: bytearray) -> AsyncIterator[bytes]:
    async for piece in response.content.iter_any():
        kept += piece[: max(0, _KEPT_BYTES - len(kept))]
        yield piece
