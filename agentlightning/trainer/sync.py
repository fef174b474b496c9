"""The door between sync user code and the event loop: running a coroutine to its end, and Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from agentlightning.runner.executor import new_event_loop


@contextmanager
def stop_on_interrupt(stop: asyncio.Event, note: Callable[[str], None]) -> Iterator[None]:
    """Within the block the first Ctrl-C (or SIGTERM) sets `stop`; the second one interrupts."""
    loop = asyncio.get_running_loop()
    installed: list[signal.Signals] = []

    def interrupted() -> None:
        stop.set()
        note("Stopping: saving the last finished step (Ctrl-C again to stop at once)")
        restore()

    def restore() -> None:
        while installed:
            loop.remove_signal_handler(installed.pop())

    if threading.current_thread() is threading.main_thread():
        with suppress(NotImplementedError):  # Windows
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, interrupted)
                installed.append(number)
    try:
        yield
    finally:
        restore()


def run_sync(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end from sync code, also where a loop is running already (a notebook)."""

    def run() -> Any:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(coroutine)

    if not _inside_a_loop():
        return run()
    result: list[Any] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            result.append(run())
        except BaseException as error:  # handed to the caller's thread
            failure.append(error)

    thread = threading.Thread(target=work, name="agl-trainer")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def _inside_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
