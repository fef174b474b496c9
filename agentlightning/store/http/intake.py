"""Spans come in: as JSON at /v1/agl/spans, as OTLP at /v1/traces; from the admin, or from an attempt with its key.

Nobody waits for what one client sends: a short body is read at once, any other in a process of its own, and the rows
that it says are stored some at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Iterable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from agentlightning.errors import NotFoundError
from agentlightning.keys import REWARDS, AttemptKey
from agentlightning.net.backoff import Backoff
from agentlightning.store.http import otlp
from agentlightning.store.http.body_process import BodyProcess, rows_of
from agentlightning.store.http.problems import problem
from agentlightning.store.http.reading import Found, Given, Owner, Refused, Row, is_short, read
from agentlightning.store.operations.spans import SPAN_FIELDS
from agentlightning.store.sql import SqlLightningStore


class Intake:
    """Belongs to the event loop of its server; `close` ends its process."""

    def __init__(self, store: SqlLightningStore) -> None:
        self._store = store
        self.backoff = Backoff()
        """Of attempts whose requests are refused."""
        self._body_process = BodyProcess(charge=self._charge)

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
        """Store what an OTLP export says, part by part; what is of no attempt is counted in the answer."""
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
        return found, _rows(rows_of(part) for part in encoded)


def _encoding(headers: Mapping[str, str], is_otlp: bool) -> str:
    return headers.get("content-encoding", "") if is_otlp else ""


async def _rows(parts: Iterable[list[Row]]) -> AsyncIterator[list[dict[str, Any]]]:
    for part in parts:
        yield [dict(zip(SPAN_FIELDS, row, strict=True)) for row in part]
        await asyncio.sleep(0)
