"""Says why the process of a command or a script that is done does not end: threads that the agent's packages left.

Nothing is stopped: what such a thread does may be worth waiting for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable

from agentlightning.console import safe

SECONDS = 5.0
"""A process that takes longer to end waits for somebody."""
_LOOKING = "agl-left-running"


def say_who_is_left(seconds: float = SECONDS, after: threading.Thread | None = None) -> threading.Thread:
    """Look a while after this thread's end, or after now, unless the process has ended by then; one look is enough."""
    looking = next((thread for thread in threading.enumerate() if thread.name == _LOOKING), None)
    if looking is None:
        looking = threading.Thread(target=_look, args=(seconds, after), name=_LOOKING, daemon=True)
        looking.start()
    return looking


def of_a_script(seconds: float = SECONDS) -> None:
    """After a training of a script: look when the script has come to its end, if anybody is left by now."""
    if left_running(threading.enumerate()):
        say_who_is_left(seconds, after=threading.main_thread())


def _look(seconds: float, after: threading.Thread | None) -> None:
    if after is not None:
        after.join()
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
        f"The work is done, and its process waits for what the agent or its packages left running ({names}). Close "
        "what started it, such as a connection, a checkpointer or a client, or make it inside the agent. Ctrl-C ends "
        "the process.\n"
    )


def _made_by(thread: threading.Thread) -> str:
    module = getattr(getattr(thread, "_target", None), "__module__", None) or type(thread).__module__
    return "" if module == "threading" else f" of {module}"
