"""`ReplicaSampler`: one engine on the cluster that is kept alive, and kept at the weights that were published last.

It is a model process without a learner. One that ends is started again, wherever Ray finds room, and gets the current
weights before it samples.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from agentlightning.backend.embedded.client import ModelProcess
from agentlightning.backend.ray.server import Placed
from agentlightning.errors import AgentLightningError, BackendDied, EngineError

logger = logging.getLogger(__name__)

Launch = Callable[[], Awaitable[tuple[Placed, ModelProcess]]]
"""Places a host and starts a model process in it."""
Bring = Callable[["ReplicaSampler"], Awaitable[None]]
"""Gives one that just began the current weights."""
Leave = Callable[[Placed], Awaitable[None]]
"""Removes what only this host was still to read."""


class ReplicaSampler:
    """`run` keeps it alive until it is cancelled, or gives up with an EngineError."""

    def __init__(self, name: str, launch: Launch, bring: Bring, leave: Leave, *, restarts: int) -> None:
        self.name = name
        self.running = 0
        """Requests that it is sampling."""
        self.served = 0
        """Requests that it finished."""
        self.ready = asyncio.Event()
        self.publication_seconds = 0.0
        self.host: Placed | None = None
        self.process: ModelProcess | None = None
        self._launch = launch
        self._bring = bring
        self._leave = leave
        self._restarts = restarts
        self._replaced = ""
        """Why it is, if that was not its own end."""

    def replace(self, host: Placed | None, why: str) -> None:
        """End this host; another one is started in its place. Nothing to do where that has begun already."""
        if host is not None and host is self.host:
            self._replaced = why
            self.ready.clear()
            host.end()

    def lost(self, cause: BackendDied) -> None:
        self.ready.clear()

    async def run(self) -> None:
        """Raises EngineError when it cannot be started, or died too often."""
        deaths, served = 0, 0
        while True:
            try:
                await self._live()
            except BackendDied as end:
                death = BackendDied(self._replaced) if self._replaced else end
                deaths = 1 if self.served > served else deaths + 1
                served = self.served
                if deaths > self._restarts:
                    raise EngineError(f"{death}\nIt was started {deaths} times and ended each time.") from death
                logger.warning("%s\nIt is started again.", death)
            finally:
                self.ready.clear()
                await self._end()

    async def _live(self) -> None:
        self._replaced = ""
        self.host, self.process = await self._launch()
        await self._bring(self)
        self.ready.set()
        logger.info("%s samples", self.host)
        await self.process.watch()

    async def _end(self) -> None:
        process, self.process = self.process, None
        host, self.host = self.host, None
        if process is not None:
            with suppress(AgentLightningError):
                await process.close()
        if host is not None:
            await self._leave(host)
            host.end()
