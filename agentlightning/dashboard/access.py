"""Who may look: on loopback whoever is on this machine, elsewhere who logged in with the store's key.

A login is answered with a cookie that scripts cannot read and other sites cannot send. Keys never stand in URLs. Pages
of other sites are kept out by the `Guard` in front of every server.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections import OrderedDict

from starlette.requests import Request

COOKIE = "agl_dashboard"
SESSION_SECONDS = 7 * 86400.0
MOST_SESSIONS = 1000
PAUSE_SECONDS = 0.5
"""After a wrong key; wrong keys wait for each other, so that they cannot be tried quickly."""


class Access:
    """Decides about requests; knows the sessions. `key` None: nobody can log in, which is for loopback only."""

    def __init__(self, key: str | None, *, loopback: bool) -> None:
        self._key = key
        self._loopback = loopback
        self._sessions: OrderedDict[str, float] = OrderedDict()
        self._wrong = asyncio.Lock()

    def allows(self, request: Request) -> bool:
        if self._loopback:
            return True
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if key and self._matches(key):
            return True
        ends = self._sessions.get(request.cookies.get(COOKIE, ""))
        return ends is not None and ends > time.time()

    async def log_in(self, key: str) -> str | None:
        """A new session's cookie; None, after a while, for a wrong key."""
        if not self._matches(key):
            async with self._wrong:
                await asyncio.sleep(PAUSE_SECONDS)
            return None
        session = secrets.token_urlsafe(32)
        self._sessions[session] = time.time() + SESSION_SECONDS
        while len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def log_out(self, request: Request) -> None:
        self._sessions.pop(request.cookies.get(COOKIE, ""), None)

    def _matches(self, key: str) -> bool:
        return self._key is not None and hmac.compare_digest(key.encode(), self._key.encode())
