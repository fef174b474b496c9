"""Where agents run: async ones in an event loop of their own, sync ones each in a daemon thread.

So an agent that blocks or spins never stalls the gateway, the store or the algorithm, which live in another loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from agentlightning.errors import AgentError

T = TypeVar("T")

CLEANUP_SECONDS = 10.0
"""How long an async agent that is stopped may take to clean up, before it is left behind."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop event loop where there is one, else asyncio's own."""
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class AgentLoop:
    """An event loop in a daemon thread. Context variables of the caller are seen by what runs in it.

    It lives as long as the process: clients that an agent makes once, at module level, keep connections that
    belong to it.
    """

    def __init__(self) -> None:
        self._loop = new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="agl-agents", daemon=True).start()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run in the agents' loop and wait; cancelling the wait cancels what runs, and waits for its cleanup."""
        ended: concurrent.futures.Future[asyncio.Task[T]] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(ended.set_result)

        self._loop.call_soon_threadsafe(start)
        waiting = asyncio.wrap_future(ended)
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())  # it comes after `start`
            await asyncio.wait({waiting}, timeout=CLEANUP_SECONDS)
            raise
        if tasks[0].cancelled():
            raise AgentError("The agent cancelled itself: a CancelledError came out of it.")
        return tasks[0].result()


@functools.cache
def agent_loop() -> AgentLoop:
    """The process's one loop for agents."""
    return AgentLoop()


def run_in_thread(function: Callable[[], T]) -> Awaitable[T]:
    """Run a sync agent in a daemon thread with the caller's context variables.

    A thread cannot be stopped from outside: when the wait is cancelled it is left behind and its result dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(setter: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            setter(value)

    def work() -> None:
        try:
            result = context.run(function)
        except BaseException as error:  # whatever the agent raises, SystemExit too, is its outcome
            failure = RuntimeError("the agent raised StopIteration") if isinstance(error, StopIteration) else error
            post(future.set_exception, failure)
        else:
            post(future.set_result, result)

    def post(setter: Callable[[Any], None], value: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, setter, value)

    threading.Thread(target=work, name="agl-agent", daemon=True).start()
    return future
