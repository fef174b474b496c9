"""Runners outside the trainer's process: they reach the store's server and the gateway over HTTP, outbound only.

They may join and leave at any time: what one that vanishes had claimed is handed out again when its lease runs out. One
key, the store's admin key, is all they need: the keys of attempts are signed with a secret derived from it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from agentlightning.errors import StoreError, StoreUnavailableError
from agentlightning.keys import (
    CLOSE,
    SECRET,
    derived_secret,
    new_secret,
    not_empty,
    redacted,
    sign_attempt_key,
    sign_url_key,
)
from agentlightning.litagent import LitAgent
from agentlightning.net.local_keys import find_key
from agentlightning.net.outgoing import UnwantedAnswer, http_session, reason_of
from agentlightning.runner.runner import LitAgentRunner
from agentlightning.store import LightningStoreClient
from agentlightning.tracer import OtelTracer, Tracer
from agentlightning.types import LLM, Hook, ProxyLLM

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 60.0
"""How long opening or closing an attempt is tried while the gateway cannot be reached."""
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 70.0
"""A gateway that does not answer a request for so long is out of reach. How long the request waits for one of the
connections does not count: thousands of attempts that end together are closed in turn, however long that takes."""
MAX_CONNECTIONS = 256
_STAY_SECONDS = 25.0
PROBE_SECONDS = 10.0
"""A server that does not answer for so long is out of reach."""
_WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Address:
    """Where the store's server is, and what opens it."""

    url: str
    key: str | None
    secret: bytes | None = field(default=None, repr=False)
    """Signs the attempts' keys; None derives it from `key`."""
    run_id: str | None = None
    """The run whose rollouts are claimed; None: of any."""

    def __post_init__(self) -> None:
        not_empty(self.key, f"The key for the store at {self.url}")
        not_empty(self.secret, SECRET)

    @property
    def signing_secret(self) -> bytes:
        """Without a key nothing is known that a gateway would accept; a secret of one's own opens nothing."""
        key = self.key or find_key(self.url)
        return self.secret or (derived_secret(key) if key else new_secret())


class _Summary(msgspec.Struct, frozen=True):
    """What the gateway answers when an attempt is closed."""

    calls: int = 0
    limit: str | None = None
    infra_error: str | None = None
    refused: str | None = None
    forwarded: int = 0
    refused_by_provider: str | None = None
    lost: str | None = None
    rewarded: bool = False

    def __add__(self, other: _Summary) -> _Summary:
        """What an attempt did at two gateways."""
        return _Summary(**{name: getattr(self, name) or getattr(other, name) for name in self.__struct_fields__})


class _Health(msgspec.Struct, frozen=True):
    """What the gateway answers when it is asked who it is."""

    instance: str


_Answer = TypeVar("_Answer", _Summary, _Health)


class RemoteGateway:
    """The gateways as a runner elsewhere sees them: URLs and keys are made here, the rest goes over HTTP.

    The barrier at an attempt's end holds although a gateway may be killed and another one take its place: who serves
    is asked before the agent begins and told when the attempt is closed; another one cannot say that all is stored.
    """

    def __init__(self, address: Address) -> None:
        self._secret = address.signing_secret
        self._host = urlsplit(address.url).hostname or "127.0.0.1"
        self._bound: dict[str, dict[str, str]] = {}
        """Of the attempts that run here: the instance behind each endpoint, empty while it has not been asked."""
        self._http: aiohttp.ClientSession | None = None
        self._closed = False

    def bind(self, resource: ProxyLLM, rollout_id: str, attempt_id: str, scopes: Sequence[str]) -> LLM:
        """The endpoint for one attempt. A gateway that listens on all addresses is taken to be beside the store."""
        parts = urlsplit(resource.endpoint)
        if parts.hostname in _WILDCARDS:
            host = f"[{self._host}]" if ":" in self._host else self._host
            url = parts._replace(netloc=f"{host}:{parts.port}").geturl()
            resource = resource.model_copy(update={"endpoint": url})
        bound = resource.for_attempt(
            rollout_id,
            attempt_id,
            sign_attempt_key(self._secret, rollout_id, attempt_id, scopes),
            sign_url_key(self._secret, rollout_id, attempt_id, scopes),
        )
        self._bound.setdefault(attempt_id, {})[bound.endpoint] = ""
        return bound

    async def open_attempt(self, rollout_id: str, attempt_id: str) -> None:
        """Ask who serves. Raises StoreError when a gateway stays out of reach."""
        bound = self._bound.get(attempt_id, {})
        for endpoint in bound:
            health = await self._until_answered(endpoint, partial(self._health, f"{endpoint}/health"))
            bound[endpoint] = health.instance

    async def close_attempt(self, rollout_id: str, attempt_id: str) -> _Summary:
        """Raises StoreError when a gateway cannot be reached or cannot store the attempt's calls."""
        key = sign_attempt_key(self._secret, rollout_id, attempt_id, (CLOSE,))
        whole = _Summary()
        for endpoint, instance in self._bound.get(attempt_id, {}).items():
            whole += await self._until_answered(endpoint, partial(self._close, f"{endpoint}/close", key, instance))
        self._bound.pop(attempt_id, None)
        return whole

    async def _until_answered(self, endpoint: str, ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
        end = time.monotonic() + CLOSE_SECONDS
        while True:
            try:
                return await ask()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if self._closed or time.monotonic() > end or isinstance(error, UnwantedAnswer):
                    why = reason_of(error)
                    raise StoreError(redacted(f"The gateway at {endpoint} cannot be reached: {why}.")) from error
            await asyncio.sleep(1.0)

    async def _health(self, url: str) -> _Health:
        async with self._session().get(url) as response:
            body = await response.read()
        try:
            return msgspec.json.decode(body, type=_Health)  # 503 is an answer, too: it has no model just now
        except msgspec.DecodeError as error:
            raise StoreError(redacted(f"There is no gateway at {url}: it answers {body[:300]!r}.")) from error

    async def _close(self, url: str, key: str, instance: str) -> _Summary:
        headers = {"Authorization": f"Bearer {key}"}
        async with self._session().post(url, headers=headers, json={"opened_at": instance}) as response:
            body = await response.read()
            if response.status == 503:
                raise StoreUnavailableError(f"The gateway could not store the attempt's calls: {body[:300]!r}")
            if response.status != 200:
                raise StoreError(f"The gateway did not close the attempt ({response.status}): {body[:300]!r}")
        return msgspec.json.decode(body, type=_Summary)

    def _session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise StoreError("The gateway was out of reach when the runner stopped.")
        if self._http is None:
            self._http = http_session(
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=ANSWER_SECONDS),
            )
        return self._http

    async def close(self) -> None:
        """What is being closed fails with StoreError."""
        self._closed = True
        if self._http is not None:
            await self._http.close()


async def serve_rollouts(
    agent: LitAgent[Any],
    address: Address,
    *,
    stop: asyncio.Event,
    hooks: Sequence[Hook] = (),
    tracer: Tracer | None = None,
    concurrency: int = 64,
    max_rollouts: int | None = None,
    give_up_seconds: float | None = None,
    worker_id: str | None = None,
) -> None:
    """Claim and run rollouts until `stop` is set, or the server has been out of reach for `give_up_seconds`.

    `worker_id` is the name under which the store knows it; None makes one. What runs then is finished first.
    When the server is out of reach, it is given up: the store hands it out again.
    """
    store, gateway = LightningStoreClient(address.url, key=address.key), RemoteGateway(address)
    runner = LitAgentRunner(
        tracer or OtelTracer(), max_rollouts, concurrency=concurrency, gateway=gateway, run_id=address.run_id
    )
    runner.init(agent, hooks)
    runner.init_worker(0 if worker_id is None else worker_id, store)
    running = asyncio.create_task(runner.iter(stop))
    gone = asyncio.create_task(_until_gone(address, stop, give_up_seconds))
    staying = asyncio.create_task(_stay(store, runner.worker_id))
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            gone.result()
            logger.warning("What runs here is given up; the store hands it out again when its leases run out.")
            await gateway.close()
            await store.close()
            running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        if not running.cancelled():
            running.result()
    finally:
        for task in (running, gone, staying):
            task.cancel()
        await asyncio.gather(running, gone, staying, return_exceptions=True)
        runner.teardown()
        await gateway.close()
        await store.close()


async def _stay(store: LightningStoreClient, worker_id: str) -> None:
    """Keep a connection open, whose end tells the store that this process has ended."""
    while True:
        try:
            await store.stay(worker_id, _STAY_SECONDS)
        except StoreError as error:  # an older server, or none just now: then leases tell it
            logger.debug("The store does not see this runner's presence: %s", error)
            await asyncio.sleep(_STAY_SECONDS)


async def _until_gone(address: Address, stop: asyncio.Event, give_up_seconds: float | None) -> None:
    """Says when the server goes and comes, and sets `stop` when it stays away. Returns when it is away after a stop."""
    client = LightningStoreClient(address.url, key=address.key, retry_seconds=0.0, request_seconds=PROBE_SECONDS)
    last, lost = time.monotonic(), False
    stopping = asyncio.create_task(stop.wait())
    try:
        while not (lost and stop.is_set()):
            unavailable: StoreUnavailableError | None = None
            try:
                await client.statistics()
            except StoreUnavailableError as error:
                unavailable = error
            except StoreError as error:  # it is there; what it refuses here, it also refuses to claims, which say so
                logger.debug("The store answered %s", error)
            if unavailable is None:
                if lost:
                    logger.warning("The store at %s is back.", address.url)
                last = time.monotonic()
            elif not lost:
                logger.warning("%s The runner goes on when it is back.", unavailable)
            lost = unavailable is not None
            if give_up_seconds is not None and time.monotonic() - last > give_up_seconds:
                logger.warning("The store was out of reach for %g s: the runner stops.", give_up_seconds)
                stop.set()
            if stop.is_set():
                await asyncio.sleep(1.0)
            else:
                await asyncio.wait({stopping}, timeout=2.0)  # wait_for would lose a cancellation that comes with `stop`
    finally:
        stopping.cancel()
        await client.close()
