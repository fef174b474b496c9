"""`Replica`: one vLLM server that is kept alive, and kept at the weights that were published last.

A replica is ready or it is not. It is ready once it answers and holds the current weights; it stops being ready when
its process ends, when it stops answering, or when a request finds that something is wrong with it. One of ours is then
started again; one that somebody else started is waited for. Either way it gets the current weights before it samples.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from agentlightning.backend.vllm.api import UnknownAdapter, VLLMApi
from agentlightning.backend.vllm.process import VLLMProcess
from agentlightning.errors import BackendDied, EngineError, ModelError, message_of

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""How often a replica is asked whether it is well."""
DEAF_LOOKS = 3
"""So many looks in a row without an answer, and it is given up."""
SAY_SECONDS = 20.0
"""How often the log says that a server is still starting."""

Launch = Callable[[], Awaitable[tuple[str, VLLMProcess]]]
"""Starts a server; its base URL and its process."""
Bring = Callable[["Replica"], Awaitable[None]]
"""Gives a server that just began the current weights."""


class Replica:
    """`run` keeps it alive until it is cancelled, or gives up with an EngineError."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        api_key: str | None = None,
        launch: Launch | None,
        bring: Bring,
        start_seconds: float,
        restarts: int = 0,
    ) -> None:
        """`launch` is None for a server that somebody else started at `url`."""
        self.name = name
        self.api = VLLMApi(url, api_key)
        self.running = 0
        """Requests that it is sampling."""
        self.served = 0
        """Requests that it finished."""
        self.ready = asyncio.Event()
        self.publication_seconds = 0.0
        self.process: VLLMProcess | None = None
        self._launch = launch
        self._bring = bring
        self._start_seconds = start_seconds
        self._restarts = restarts
        self._suspected = asyncio.Event()
        self._stale = False
        self._failed = 0

    def suspect(self, *, stale: bool = False) -> None:
        """Something went wrong with a request: nothing is asked of it until it has been looked at. `stale`: it does not
        hold the current weights."""
        self._stale = self._stale or stale
        self.ready.clear()
        self._suspected.set()

    def lost(self, cause: BackendDied) -> None:
        self.suspect(stale=isinstance(cause, UnknownAdapter))

    async def run(self) -> None:
        """Raises EngineError when it cannot be started the first time, or died too often."""
        deaths, served = 0, 0
        try:
            while True:
                how = await self._live(may_fail=deaths > 0)
                deaths = 1 if self.served > served else deaths + 1
                served = self.served
                self.ready.clear()
                await self._end()
                if self._launch is not None and deaths > self._restarts:
                    raise EngineError(f"{how}\nIt was started {deaths} times and ended each time.")
                logger.warning("%s: %s", self.name, how)
        finally:
            self.ready.clear()
            await self._end()

    async def _live(self, *, may_fail: bool) -> str:
        """From its start to its loss; how it was lost. `may_fail`: it has been started before, so that a start that
        fails is one more death and not the sign of a wrong setting; nor is the end of what it was to run on."""
        try:
            await self._start()
        except EngineError as error:
            if not (may_fail or isinstance(error, BackendDied)):
                raise
            return message_of(error)
        try:
            await self._bring_up()
            return await self._until_lost()
        except (EngineError, ModelError) as error:
            if self._launch is None:
                raise
            return message_of(error)

    async def _start(self) -> None:
        """Start the server, if it is ours, and wait until it answers."""
        if self._launch is not None:
            self.api.url, self.process = await self._launch()
            logger.info("%s is starting at %s; its log is %s", self.name, self.api.url, self.process.log)
        loop = asyncio.get_running_loop()
        began = reported = loop.time()
        while not await self.api.is_healthy():
            if self.process is not None and self.process.ended.done():
                raise self.process.ended.result()
            if loop.time() - began > self._start_seconds:
                words = await self.process.last_words() if self.process is not None else ""
                raise EngineError(
                    f"{self.name} did not answer within {self._start_seconds:.0f} s.{words}\n"
                    "A large model on a slow disk may need more: backend_options={'start_seconds': …}."
                )
            if loop.time() - reported > SAY_SECONDS:
                reported = loop.time()
                logger.info("%s is not ready yet (%.0f s)", self.name, reported - began)
            await asyncio.sleep(min(LOOK_SECONDS, 0.2 + (loop.time() - began) / 10))

    async def _bring_up(self) -> None:
        """Give it the current weights; from then on it samples. Raises EngineError or ModelError where it never
        takes them."""
        self._suspected.clear()
        self._stale = False
        try:
            await self._bring(self)
        except (EngineError, ModelError):
            self._failed += 1
            if self._failed >= DEAF_LOOKS:
                raise
            self.suspect(stale=True)
        else:
            self._failed = 0
            self.ready.set()

    async def _until_lost(self) -> str:
        """Look after it as long as it is well; how it was lost."""
        deaf = 0
        while deaf < DEAF_LOOKS:
            await self._next_look()
            if self.process is not None and self.process.ended.done():
                return str(self.process.ended.result())
            if not await self.api.is_healthy():
                deaf += 1
                self.ready.clear()
                self._suspected.set()
                await asyncio.sleep(LOOK_SECONDS / 4)
                continue
            deaf = 0
            if self._stale:
                await self._bring_up()
            elif self._suspected.is_set():
                self._suspected.clear()
                self.ready.set()
        return f"The vLLM server at {self.api.url} does not answer."

    async def _next_look(self) -> None:
        """Wait for the time of the next look, for a reason to look at once, or for the end of the process."""
        reason = asyncio.create_task(self._suspected.wait())
        ended = [self.process.ended] if self.process is not None else []
        await asyncio.wait([reason, *ended], timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        reason.cancel()

    async def _end(self) -> None:
        """What is under way is lost; the process ends, if it is ours."""
        await self.api.close()
        process, self.process = self.process, None
        if process is not None:
            await process.stop()
