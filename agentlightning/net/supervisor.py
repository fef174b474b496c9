"""A helper process as a server's event loop uses it: started when it is first needed, and again when it has died.

It holds one conversation at a time, and owners take turns. A conversation that does not end as it should would leave
its answers to the next one, so the process ends with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import TypeVar

from agentlightning.net.helper_process import HelperProcess
from agentlightning.net.places import Places

_STOP_SECONDS = 2.0
"""How long a conversation may go on when nobody waits for its result."""

T = TypeVar("T")


class HelperLost(Exception):
    """The process did not live to answer. The message says how it ended, such as "by signal SIGKILL"."""


class Supervisor:
    """Belongs to one event loop; `close` ends its process."""

    def __init__(self, module: str, environment: Mapping[str, str] | None = None, stop: bytes = b"") -> None:
        """`module` is run with `environment` added to this process's. `stop`, if given, is the message that makes it
        give up an answer for which nobody waits."""
        self._module = module
        self._environment = environment
        self._stop = stop
        self._places = Places(1)
        self._process: HelperProcess | None = None
        self._starting: asyncio.Task[HelperProcess] | None = None
        """Goes on when who began it is cancelled: the next conversation waits for it."""
        self._conversations: set[asyncio.Task[object]] = set()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one that lives."""
        return None if self._process is None or self._process.ended else self._process.pid

    @property
    def is_busy(self) -> bool:
        """Whether a conversation goes on."""
        return bool(self._conversations)

    async def run(self, owner: Hashable, conversation: Callable[[HelperProcess], Awaitable[T]]) -> T:
        """What a conversation with the process returns. If it raises, the process ends.

        If the caller is cancelled, the conversation may come to its end for a moment.

        Raises:
            HelperLost: The process ended, or the supervisor is closed.
            OSError: The process cannot be started.
        """
        async with self._places.one(owner):
            running = asyncio.create_task(self._run(conversation))
            self._conversations.add(running)
            running.add_done_callback(self._done)
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                if self._stop and self._process is not None:
                    self._process.send_soon(self._stop)
                await asyncio.wait([running], timeout=_STOP_SECONDS)
                raise
            finally:
                if not running.done():  # the next conversation starts a process of its own
                    self._process = None
                    running.cancel()
            return running.result()

    async def close(self) -> None:
        """End the process, and each conversation with it."""
        self._closed = True
        if self._starting is not None:
            await asyncio.wait([self._starting])
            if self._starting is not None and self._starting.exception() is None:
                self._process = self._starting.result()
        if self._process is not None:
            await self._end(self._process)
        await asyncio.gather(*self._conversations, return_exceptions=True)

    async def _run(self, conversation: Callable[[HelperProcess], Awaitable[T]]) -> T:
        process = await self._started()
        try:
            return await conversation(process)
        except (ConnectionError, EOFError) as error:
            raise HelperLost(await self._end(process)) from error
        except BaseException:
            await self._end(process)
            raise

    async def _started(self) -> HelperProcess:
        if self._process is not None and self._process.ended:
            await self._end(self._process)
        if self._closed:
            raise HelperLost("with the server")
        if self._process is None:
            self._process = await self._start()
        return self._process

    async def _start(self) -> HelperProcess:
        if self._starting is None:
            self._starting = asyncio.create_task(HelperProcess.start(self._module, self._environment))
        try:
            process = await asyncio.shield(self._starting)
        except OSError:
            self._starting = None
            raise
        self._starting = None
        return process

    async def _end(self, process: HelperProcess) -> str:
        """End it if it lives, and say how it ended."""
        if self._process is process:
            self._process = None
        return await process.death()

    def _done(self, running: asyncio.Task[object]) -> None:
        self._conversations.discard(running)
        if not running.cancelled():
            running.exception()  # where nobody waits for it, it is dropped
