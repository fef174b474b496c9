"""`Sampler`: one engine on the cluster that is kept alive, and kept at the weights that were published last.

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
Bring = Callable[["Sampler"], Awaitable[None]]
"""Gives one that just began the current weights."""


class Sampler:
    """`run` keeps it alive until it is cancelled, or gives up with an EngineError."""

    def __init__(self, name: str, launch: Launch, bring: Bring, *, restarts: int) -> None:
        self.name = name
        self.running = 0
        """Requests that it is sampling."""
        self.served = 0
        """Requests that it finished."""
        self.ready = asyncio.Event()
        self.host: Placed | None = None
        self.process: ModelProcess | None = None
        self._launch = launch
        self._bring = bring
        self._restarts = restarts

    def lost(self, cause: BackendDied) -> None:
        self.ready.clear()

    async def run(self) -> None:
        """Raises EngineError when it cannot be started, or died too often."""
        deaths, served = 0, 0
        while True:
            try:
                await self._live()
            except BackendDied as death:
                deaths = 1 if self.served > served else deaths + 1
                served = self.served
                if deaths > self._restarts:
                    raise EngineError(f"{death}\nIt was started {deaths} times and ended each time.") from death
                logger.warning("%s\nIt is started again.", death)
            finally:
                self.ready.clear()
                await self._end()

    async def _live(self) -> None:
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
            host.end()
