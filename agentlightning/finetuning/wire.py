"""Small parts of the API's wire format: refusals, pages, lists that go on behind an item."""

from __future__ import annotations

import errno
import secrets
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request

from agentlightning.finetuning.records import Records, Row
from agentlightning.gateway.exchange import Refusal
from agentlightning.reading import whole_number

MOST_ON_A_PAGE = 10_000
MOST_BODY = 4 << 20
"""Of a body that is neither a file nor data to learn from."""
_DISK = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR)
LOCAL = "org-local"
"""The only organisation: keys are what tells users apart."""


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def missing(what: str, key: str) -> Refusal:
    """The refusal of an id that there is not, or that is another key's: nobody learns which."""
    return Refusal(f"There is no {what} '{key[:200]}'.", status=404, code="not_found", param="id")


def bad(message: str, param: str | None, code: str = "invalid_value") -> Refusal:
    """The refusal of a value, with the name of its field."""
    return Refusal(message, param=param, code=code)


def unwritable(error: Exception) -> Refusal | None:
    """The refusal where the server's disk is full or may not be written; None for another error."""
    is_disk = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    if not is_disk and not (isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF in _DISK):
        return None
    words = f"The server cannot write: {error}. Its owner has to make room."
    return Refusal(words, status=507, kind="server_error", code="disk_full")


async def read_body(request: Request, most: int) -> bytes:
    """Raises `Refusal` for one that is too long."""
    found = bytearray()
    async for piece in request.stream():
        found += piece
        if len(found) > most:
            raise Refusal(f"The body has more than {most} bytes.", status=413, code="body_too_large")
    return bytes(found)


def limit_of(query: Mapping[str, str], default: int) -> int:
    given = query.get("limit")
    if given is None:
        return default
    if (found := whole_number(given)) is None or not 1 <= found <= MOST_ON_A_PAGE:
        raise bad(f"limit is {given[:50]!r}; it is a number from 1 to {MOST_ON_A_PAGE}.", "limit")
    return found


def page(
    records: Records,
    table: str,
    where: str,
    values: Sequence[Any],
    query: Mapping[str, str],
    seen: Callable[[Row], Any],
    *,
    default: int = 20,
    ascending: bool = False,
) -> dict[str, Any]:
    """The rows of a table for which `where` holds, the newest first, behind the one that `after` names."""
    limit, order, compared = limit_of(query, default), *(("ASC", ">") if ascending else ("DESC", "<"))
    if (after := query.get("after")) is not None:
        last = records.row(f"SELECT seq FROM {table} WHERE id = ? AND {where}", after, *values)
        if last is None:
            raise bad(f"'{after[:200]}' is none of these, so nothing comes after it.", "after")
        where, values = f"{where} AND seq {compared} ?", (*values, last["seq"])
    found = records.rows(f"SELECT * FROM {table} WHERE {where} ORDER BY seq {order} LIMIT ?", *values, limit + 1)
    return listed([seen(row) for row in found[:limit]], len(found) > limit)


def listed(items: Sequence[Any], has_more: bool = False) -> dict[str, Any]:
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return {"object": "list", "data": list(items), "has_more": has_more, **ends}
