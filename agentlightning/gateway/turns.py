"""Turns on the event loop: what one attempt does at once cannot make the calls of the others wait.

Work on the event loop is done in the order in which it came. An attempt that brings a thousand short pieces of it would
have them all done before anybody else's next one.
"""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 4
"""Pieces of work of one attempt in each pass of the event loop."""
IN_A_ROW = 64
"""After so many, pieces that have waited without a break are done more slowly, at a pace that leaves others room."""
PAUSE = 0.01
"""Seconds between them from then on, instead of a pass of the event loop."""


class Turns:
    """Lets `AT_ONCE` pieces of work begin in each pass of the event loop; the rest wait, first come, first served."""

    def __init__(self) -> None:
        self._left = AT_ONCE
        self._in_a_row = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Return when it is this piece's turn: at once, without a pass of the event loop, unless there are many."""
        loop = asyncio.get_running_loop()
        if self._left and not self._waiting:
            if self._left == AT_ONCE:
                loop.call_soon(self._renew)
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _renew(self) -> None:
        self._left = AT_ONCE
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled: its client went away
                turn.set_result(None)
                self._left -= 1
        if self._left == AT_ONCE:
            self._in_a_row = 0
            return
        self._in_a_row += AT_ONCE - self._left
        if self._in_a_row > IN_A_ROW:
            asyncio.get_running_loop().call_later(PAUSE, self._renew)
        else:
            asyncio.get_running_loop().call_soon(self._renew)
