"""The door between sync user code and the event loop: running a coroutine to its end, and Ctrl-C."""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from agentlightning.runner.executor import new_event_loop

_stoppers: dict[asyncio.AbstractEventLoop, Callable[[], None]] = {}
"""What a Ctrl-C does to the work in a loop that is not the main thread's; see `run_sync`."""


@contextmanager
def stop_on_interrupt(stop: asyncio.Event, note: Callable[[str], None]) -> Iterator[list[signal.Signals]]:
    """Within the block the first Ctrl-C (or SIGTERM) sets `stop`; the second one interrupts. Yields what was heard."""
    received: list[signal.Signals] = []
    loop = asyncio.get_running_loop()
    installed: list[signal.Signals] = []
    before = signal.getsignal(signal.SIGTERM)

    def interrupted(number: signal.Signals = signal.SIGINT) -> None:
        received.append(number)
        stop.set()
        note("Stopping: saving the last finished step (Ctrl-C again to stop at once)")
        restore()

    def restore() -> None:
        _stoppers.pop(loop, None)
        while installed:
            number = installed.pop()
            loop.remove_signal_handler(number)
            if number is signal.SIGTERM and before is not None:  # asyncio would leave the system's default
                signal.signal(number, before)

    if threading.current_thread() is threading.main_thread():
        with suppress(NotImplementedError):  # Windows
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, interrupted, number)
                installed.append(number)
    else:
        _stoppers[loop] = interrupted
    try:
        yield received
    finally:
        restore()


async def run_with_background(
    deciding: Coroutine[Any, Any, None], background: Sequence[Coroutine[Any, Any, Any]]
) -> None:
    """Run `deciding` to its end. One of the others that fails ends it, too; all are cancelled then."""
    decided = asyncio.create_task(deciding)
    tasks = [decided, *[asyncio.create_task(one) for one in background]]
    try:
        pending = set(tasks)
        while not decided.done():
            finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_sync(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end from sync code, also where a loop is running already (a notebook)."""
    if _inside_a_loop():
        return _run_in_a_thread(coroutine)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(coroutine)


def _run_in_a_thread(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The caller's thread waits; its first Ctrl-C stops the work as `stop_on_interrupt` says, the second cancels it."""
    result: concurrent.futures.Future[Any] = concurrent.futures.Future()
    loop = new_event_loop()
    main = loop.create_task(coroutine)

    def work() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                value = runner.run(_awaited(main))
            result.set_result(value)
        except BaseException as error:  # handed to the caller's thread
            result.set_exception(error)

    def interrupted(*_: object) -> None:
        loop.call_soon_threadsafe(_stoppers.get(loop, main.cancel))

    with _handling_sigint(interrupted):
        threading.Thread(target=work, name="agl-trainer").start()
        try:
            return result.result()
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


async def _awaited(task: asyncio.Task[Any]) -> Any:
    return await task


@contextmanager
def _handling_sigint(handler: Callable[..., None]) -> Iterator[None]:
    """Instead of whoever handles it now, who may wait for the very loop that waits for us."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _inside_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
