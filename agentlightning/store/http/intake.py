"""Spans come in: as JSON at /v1/agl/spans, as OTLP at /v1/traces; from the admin, or from an attempt with its key.

Nobody waits for what one client sends: a short body is read at once, any other one by a process of its own, one body at
a time, and its rows are stored some at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from agentlightning.errors import NotFoundError, StoreUnavailableError
from agentlightning.keys import REWARDS, AttemptKey
from agentlightning.net.backoff import Backoff
from agentlightning.net.helper_process import HelperProcess
from agentlightning.net.supervisor import HelperLost, Supervisor
from agentlightning.store.http import otlp
from agentlightning.store.http.problems import problem
from agentlightning.store.http.reading import Found, Given, Owner, Refused, Row, is_short, read
from agentlightning.store.operations.spans import SPAN_FIELDS
from agentlightning.store.sql import SqlLightningStore

logger = logging.getLogger(__name__)


class Intake:
    """Takes spans, on the event loop of its server; `close` ends its process."""

    def __init__(self, store: SqlLightningStore) -> None:
        self._store = store
        self.backoff = Backoff()
        """The waits of attempts whose requests are refused."""
        self._body_process = _BodyProcess(charge=self._charge)

    def _charge(self, owner: Hashable, seconds: float) -> None:
        if owner is not None:  # else it was the admin's
            self.backoff.charge(owner, seconds)

    async def close(self) -> None:
        await self._body_process.close()

    async def spans(self, request: Request, body: bytes, key: AttemptKey | None = None) -> Response:
        """Store a list of spans, all or none; the answer says which were new, and their numbers."""
        found, parts = await self._read(request, body, key, is_otlp=False)
        if isinstance(found, Refused):
            return problem(found.status, found.why)
        rows = [row async for part in parts for row in part]
        numbers = await self._store.add_span_rows(rows)
        stored = [
            {"attempt_id": row["attempt_id"], "span_id": row["span_id"], "sequence_id": number}
            for row, number in zip(rows, numbers, strict=True)
            if number
        ]
        return Response(msgspec.json.encode(stored), media_type="application/json")

    async def traces(self, request: Request, body: bytes, key: AttemptKey | None = None) -> Response:
        """Store the spans of an OTLP export, part by part; the answer counts those of no attempt."""
        found, parts = await self._read(request, body, key, is_otlp=True)
        if isinstance(found, Refused):
            return problem(found.status, found.why)
        rejected, why = found.rejected, found.why
        async for part in parts:  # other requests get their turns in between
            try:
                await self._store.add_span_rows(part)
            except NotFoundError as error:
                rejected, why = rejected + len(part), why or str(error)
        return otlp.answer(rejected, why, is_json=otlp.is_json(request.headers))

    async def _read(
        self, request: Request, body: bytes, key: AttemptKey | None, *, is_otlp: bool
    ) -> tuple[Found | Refused, AsyncIterator[list[dict[str, Any]]]]:
        owner = None if key is None else Owner(key.rollout_id, key.attempt_id, REWARDS in key.scopes)
        given = Given(is_otlp, otlp.is_json(request.headers), _encoding(request.headers, is_otlp), owner)
        if is_short(given, body):
            found, parts = read(given, body)
            return found, _rows(parts)
        found, encoded = await self._body_process.read(given, body, key and (key.rollout_id, key.attempt_id))
        return found, _rows(_rows_of(part) for part in encoded)


def _encoding(headers: Mapping[str, str], is_otlp: bool) -> str:
    return headers.get("content-encoding", "") if is_otlp else ""


async def _rows(parts: Iterable[list[Row]]) -> AsyncIterator[list[dict[str, Any]]]:
    for part in parts:
        yield [dict(zip(SPAN_FIELDS, row, strict=True)) for row in part]
        await asyncio.sleep(0)


_BODY_SECONDS = 30.0
"""How long reading one body may take."""
_START_SECONDS = 60.0
"""How long the process may take to start, in addition to that."""

_encoder = msgspec.msgpack.Encoder()
_answer = msgspec.msgpack.Decoder(Found | Refused)
_part = msgspec.msgpack.Decoder(list[list[str | float | int | None]])


class _BodyProcess:
    """The process that reads large bodies, asked from one event loop by `read`, ended by `close`."""

    def __init__(
        self, seconds: float = _BODY_SECONDS, charge: Callable[[Hashable, float], None] = lambda *_: None
    ) -> None:
        """`charge` is called with the owner of each body and the seconds that reading it took."""
        self._seconds = seconds
        self._charge = charge
        self._helper = Supervisor("agentlightning.store.http.reader")

    async def read(self, given: Given, body: bytes, owner: Hashable) -> tuple[Found | Refused, list[bytes]]:
        """As `reading.read`, with the parts as they came: see `_rows_of`. Attempts take turns.

        Raises `StoreUnavailableError` if the process does not live to answer.
        """
        try:
            return await self._helper.run(owner, partial(self._exchange, given, body, owner))
        except TimeoutError:
            return Refused(413, f"Reading the request took more than {self._seconds:g} s; send smaller batches."), []
        except (OSError, HelperLost) as error:
            how = f"ended {error}" if isinstance(error, HelperLost) else f"cannot be started ({error})"
            logger.error("The process that reads large requests %s. The next one starts it again.", how)
            why = "The process that reads large requests did not live to read this one. Try again."
            raise StoreUnavailableError(why) from error

    async def close(self) -> None:
        await self._helper.close()

    async def _exchange(
        self, given: Given, body: bytes, owner: Hashable, process: HelperProcess
    ) -> tuple[Found | Refused, list[bytes]]:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self._seconds + (not process.has_answered) * _START_SECONDS):
                await process.send(_encoder.encode(given), [body])
                answer = _answer.decode(await process.receive())
                parts = answer.parts if isinstance(answer, Found) else 0
                return answer, [await process.receive() for _ in range(parts)]
        finally:
            self._charge(owner, time.perf_counter() - began)


def _rows_of(part: bytes) -> list[Row]:
    return list(_part.decode(part))
