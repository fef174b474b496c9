"""Where agents run: async ones in an event loop of their own, sync ones each in a daemon thread.

So an agent that blocks or spins never stalls the gateway, the store or the algorithm, which live in another loop. When
an agent must stop, its task is cancelled, and where that does not reach it because it holds its thread, an
`AgentStopped` is raised inside it. An agent that does not react to that either (it waits inside C code) is left behind:
a sync one with its thread, an async one with the whole loop, which is replaced.

The working directory belongs to the whole process, so it is put back when agents that changed it have ended.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from agentlightning.errors import AgentError
from agentlightning.runner.blocking import line_of, watch_for_blocking
from agentlightning.runner.endings import describe

logger = logging.getLogger(__name__)


T = TypeVar("T")

CLEANUP_SECONDS = 10.0
"""How long an async agent that is stopped may take to clean up, before it is left behind."""
STUCK_SECONDS = 0.5
"""A loop that does not answer for so long is held by an agent."""
FORCE_SECONDS = 2.0
"""How long an agent that holds its thread has to end after `AgentStopped` was raised in it."""
_AGAIN_SECONDS = 0.1
ENDING_SECONDS = 3.0
"""How long what agents left running may take to clean up when the program ends."""

_owner: contextvars.ContextVar[object | None] = contextvars.ContextVar("agentlightning_owner", default=None)


class AgentStopped(BaseException):
    """Raised inside an agent that holds its thread when its time is over. Not to be caught."""


class _Forking(threading.local):
    """Keeps signals back in a thread that forks, until they go to the right process."""

    mask: set[int] | set[signal.Signals] = set()  # noqa: RUF012 - never changed in place

    def hold(self) -> None:
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))

    def release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def leave_the_parents_loop(self) -> None:
        """A process that an agent forks (`multiprocessing.Pool`) gets its own signals. It inherits the socket that
        tells the parent's loop of them: else ending a worker with SIGTERM would stop the run."""
        if signal.set_wakeup_fd(-1) != -1:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.release()


_forking = _Forking()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_forking.hold, after_in_parent=_forking.release, after_in_child=_forking.leave_the_parents_loop
    )


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop event loop where there is one, else asyncio's own."""
    try:
        import uvloop
    except ImportError:  # Windows
        loop = asyncio.new_event_loop()
    else:
        loop = uvloop.new_event_loop()
    loop.set_exception_handler(_without_clients_left_open)
    return loop


class _AgentTask(asyncio.Task[Any]):
    """A task that knows which agent's it is, also when a library started it."""

    def __init__(self, coro: Any, **options: Any) -> None:
        self.owner = _owner.get()
        super().__init__(coro, **options)


def _without_clients_left_open(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Says what went wrong in a loop, but for a client that a sync agent used in a loop of its own and left open:
    whichever loop runs when it is collected tries to close it, and its own is closed already, with its connections."""
    error, task = context.get("exception"), context.get("future")
    name = getattr(task.get_coro(), "__qualname__", "") if isinstance(task, asyncio.Task) else ""
    if not (name.endswith(".aclose") and isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        loop.default_exception_handler(context)


def _without_streams_left_open(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Says what went wrong in a loop, but for a client's answer that an agent did not read to its end: that is closed
    with the loop, and clients cannot always do so."""
    error = context.get("exception")
    if error is not None and "was never retrieved" in context.get("message", ""):
        if not isinstance(error, asyncio.CancelledError):  # it ended with the program
            logger.warning("What an agent began and did not await failed: %s", describe(error))
    elif "asyncgen" not in context:
        _without_clients_left_open(loop, context)


class AgentLoop:
    """An event loop in a daemon thread. Context variables of the caller are seen by what runs in it.

    It lives as long as the program: clients that an agent makes once, at module level, keep connections that belong to
    it. At the program's end, before any `atexit` handler, what still runs in it is cancelled, as `asyncio.run` does.
    """

    def __init__(self) -> None:
        self._loop = new_event_loop()
        self._loop.set_task_factory(lambda loop, coro, **options: _AgentTask(coro, loop=loop, **options))
        self._thread = threading.Thread(target=self._run_forever, name="agl-agents", daemon=True)
        self._thread.start()
        self._loop.set_exception_handler(_without_streams_left_open)
        watch_for_blocking(self._loop, self._thread)
        threading.Thread(target=self._end_with_the_program, name="agl-agents-end").start()

    def _end_with_the_program(self) -> None:
        threading.main_thread().join()
        answer: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(answer.set_result, None)
        with contextlib.suppress(TimeoutError):
            answer.result(STUCK_SECONDS)  # somebody who holds the loop would never end either
            asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(ENDING_SECONDS)

    async def _cancel_all(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._loop.shutdown_asyncgens()

    def _run_forever(self) -> None:
        while True:
            try:
                self._loop.run_forever()
                return
            except BaseException:  # sys.exit() in a background task of one agent must not end the others
                logger.exception("Something an agent started tried to end the process.")

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run in the agents' loop and wait; cancelling the wait cancels what runs, and waits for its cleanup."""
        ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []
        owner = object()

        def start() -> None:
            _owner.set(owner)  # in this callback's own copy of the context
            tasks.append(self._loop.create_task(_contained(coroutine)))
            tasks[0].add_done_callback(lambda _: ended.set_result(None))

        self._loop.call_soon_threadsafe(start)
        waiting = asyncio.wrap_future(ended)
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())  # it comes after `start`
            await _to_the_end(self._stop(waiting, owner))
            raise
        if tasks[0].cancelled():
            raise AgentError("The agent cancelled itself: a CancelledError came out of it.")
        return tasks[0].result()

    async def _stop(self, waiting: asyncio.Future[None], owner: object) -> None:
        """Wait for the agent's cleanup, for at most CLEANUP_SECONDS; if it holds the loop, make it let go."""
        if await self._answers(STUCK_SECONDS):
            await asyncio.wait({waiting}, timeout=CLEANUP_SECONDS)
            if not waiting.done():
                logger.warning(
                    "An async agent that was stopped did not end within %g s: it caught its CancelledError, or cleans "
                    "up for ever. It is left behind.",
                    CLEANUP_SECONDS,
                )
        elif await self._free(owner):
            await asyncio.wait({waiting}, timeout=FORCE_SECONDS)
        else:
            replace_agent_loop(self)

    async def _answers(self, timeout: float) -> bool:
        """Whether the loop gets round to what it is asked."""
        answer: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(answer.set_result, None)
        done, _ = await asyncio.wait({asyncio.wrap_future(answer)}, timeout=timeout)
        return bool(done)

    async def _free(self, owner: object) -> bool:
        """Raise in the agent that holds the loop, if it is this one, until the loop answers."""
        end = time.monotonic() + FORCE_SECONDS
        while time.monotonic() < end:
            holder = asyncio.current_task(self._loop)
            if isinstance(holder, _AgentTask) and holder.owner is owner:
                _raise_in(self._thread)
            if await self._answers(_AGAIN_SECONDS):
                return True
        return False


_lock = threading.Lock()
_agent_loop: AgentLoop | None = None


def agent_loop() -> AgentLoop:
    """The process's one loop for agents."""
    global _agent_loop
    with _lock:
        if _agent_loop is None:
            _agent_loop = AgentLoop()
        return _agent_loop


def replace_agent_loop(stuck: AgentLoop) -> None:
    """Let new agents run in a loop of their own, because somebody holds this one and does not let go."""
    global _agent_loop
    with _lock:
        if _agent_loop is stuck:
            _agent_loop = None
            logger.error(
                "An async agent blocks its event loop and cannot be stopped: it waits in a call that is not async. New "
                "agents get another loop; those that were in this one time out. Make the agent a sync function, or "
                "await what it waits for."
            )


def forget_agent_loop() -> None:
    """In a forked process: the loop's thread stayed behind."""
    global _agent_loop
    _agent_loop = None


async def run_in_thread(function: Callable[[], T]) -> T:
    """Run a sync agent in a daemon thread with the caller's context variables; cancelling the wait stops the agent."""
    ended: concurrent.futures.Future[T] = concurrent.futures.Future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(function)
        except BaseException as error:  # whatever the agent raises, SystemExit too, is its outcome
            ended.set_exception(error if _is_ordinary(error) else AgentError(_described(error)))
        else:
            ended.set_result(result)

    thread = threading.Thread(target=work, name="agl-agent", daemon=True)
    thread.start()
    waiting = asyncio.wrap_future(ended)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        if not ended.done():
            await _to_the_end(_end_thread(thread, waiting))
        raise


async def _contained(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:  # they would end the loop
        raise AgentError(_described(error)) from error


def _is_ordinary(error: BaseException) -> bool:
    """Whether a future can hold the error, and it ends nothing but the agent."""
    return isinstance(error, Exception) and not isinstance(error, StopIteration)


def _described(error: BaseException) -> str:
    instead = " Return a reward, or raise an error, in place of exiting." if isinstance(error, SystemExit) else ""
    return f"The agent raised {type(error).__name__}({error}).{instead}"


async def _end_thread(thread: threading.Thread, waiting: asyncio.Future[Any]) -> None:
    end = time.monotonic() + FORCE_SECONDS
    while time.monotonic() < end:
        _raise_in(thread)
        done, _ = await asyncio.wait({waiting}, timeout=_AGAIN_SECONDS)
        if done:
            waiting.exception()  # it is known, and not news
            return
    logger.warning(
        "A sync agent that was stopped waits in a call that cannot be interrupted%s; its thread is left behind.",
        f" ({line})" if (line := line_of(thread)) else "",
    )


def _raise_in(thread: threading.Thread) -> None:
    """Raise AgentStopped in a thread, at its next step in Python code."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(AgentStopped))


async def _to_the_end(coroutine: Coroutine[Any, Any, None]) -> None:
    """Finish this even if we are cancelled again meanwhile."""
    task = asyncio.ensure_future(coroutine)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            continue


class _Folder:
    """The working directory of a process in which agents run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._home: str | None = None
        self._reported = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While an agent runs; afterwards the directory is that in which the first of those that run began."""
        with self._lock:
            if not self._running:
                with suppress(FileNotFoundError):
                    self._home = os.getcwd()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._return()

    def _return(self) -> None:
        if self._home is None:
            return
        with suppress(FileNotFoundError):
            if os.getcwd() == self._home:
                return
        with suppress(OSError):
            os.chdir(self._home)
        if not self._reported:
            self._reported = True
            logger.warning(
                "The agent changed the working directory of the whole process (os.chdir), in which other rollouts run "
                "and the run writes its files. It was put back to %s. Use whole paths, or cwd= of subprocess.",
                self._home,
            )


same_folder = _Folder().kept
