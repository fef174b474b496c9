"""The door between sync user code and the event loop: running a coroutine to its end, and Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from agentlightning.metrics import Reporter
from agentlightning.runner.executor import new_event_loop


def stop_on_interrupt(stop: asyncio.Event, reporter: Reporter) -> Callable[[], None]:
    """The first Ctrl-C sets `stop`; the second one interrupts. Returns what undoes it."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def interrupted() -> None:
        stop.set()
        reporter.note("Stopping: saving the last finished step (Ctrl-C again to stop at once)")
        loop.remove_signal_handler(signal.SIGINT)

    try:
        loop.add_signal_handler(signal.SIGINT, interrupted)
    except NotImplementedError:  # Windows
        return lambda: None
    return lambda: loop.remove_signal_handler(signal.SIGINT) and None


def run_sync(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end from sync code, also where a loop is running already (a notebook)."""

    def run() -> Any:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(coroutine)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
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
