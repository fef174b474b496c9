"""Says why the process of a command that is done does not end: threads that an agent's packages left running.

Nothing is stopped: what such a thread does may be worth waiting for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable

from agentlightning.console import safe

SECONDS = 5.0
"""A process that takes longer to end waits for somebody."""


def say_who_is_left(seconds: float = SECONDS) -> threading.Thread:
    """Look after a while, unless the process has ended by then."""
    looking = threading.Thread(target=_look, args=(seconds,), name="agl-left-running", daemon=True)
    looking.start()
    return looking


def _look(seconds: float) -> None:
    threading.Event().wait(seconds)
    if words := left_running(threading.enumerate()):
        sys.stderr.write(safe(words))
        sys.stderr.flush()


def left_running(threads: Iterable[threading.Thread]) -> str:
    """The words for threads that a process waits for at its end; nothing where there are none."""
    left = [t for t in threads if not (t.daemon or t is threading.main_thread() or t.name.startswith("agl-"))]
    if not left:
        return ""
    names = ", ".join(f"{thread.name}{_made_by(thread)}" for thread in left[:3])
    return (
        f"The command is done, and its process waits for what the agent or its packages left running ({names}). Close "
        "what started it, such as a connection, a checkpointer or a client, or make it inside the agent. Ctrl-C ends "
        "the process.\n"
    )


def _made_by(thread: threading.Thread) -> str:
    module = getattr(getattr(thread, "_target", None), "__module__", None) or type(thread).__module__
    return "" if module == "threading" else f" of {module}"
