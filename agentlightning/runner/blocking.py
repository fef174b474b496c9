"""Finds async agents that block: code that waits or computes without `await` holds up all agents of the process.

A thread of its own asks the agents' loop for an answer again and again. When none comes it looks at what the loop's
thread is doing, and says so once, naming the line of the user's own. Nothing is stopped: such a run is slow, not wrong.
"""

from __future__ import annotations

import asyncio
import dis
import linecache
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from agentlightning.frames import is_own

logger = logging.getLogger(__name__)

ASK_SECONDS = 0.2
"""Between two questions."""
BLOCKED_SECONDS = 0.4
"""An answer that takes longer was held up; a garbage collection or a busy machine holds it up for less."""
SAME_SECONDS = 0.1
"""How long one call of the user's holds the loop at least: many agents that each make a client hold it up together,
and none of them blocks."""
WAITED_SHARE = 0.25
"""A thread that waits longer than this share of the time for a processor is on a busy machine, which slows all code."""
REPORTED_AFTER = 5
"""Found so often at the same line: two seconds of waiting, more than a slow start takes."""
INSTEAD = (
    "Await an async client instead (AsyncOpenAI, httpx.AsyncClient, asyncio.sleep), or make the agent a plain `def`: "
    "sync agents get a thread each."
)
"""What to do about an agent that blocks its event loop."""


def watch_for_blocking(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Watch from a daemon thread until the loop has been reported, or is closed."""
    threading.Thread(target=_watch, args=(loop, thread), name="agl-blocking", daemon=True).start()


def _watch(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    seen: Counter[str] = Counter()
    while not loop.is_closed():
        time.sleep(ASK_SECONDS)
        for place in _held_up_at(loop, thread):
            seen[place] += 1
            if seen[place] == REPORTED_AFTER:
                logger.warning(
                    "The async agent blocks its event loop at %s: while it waits there no other rollout goes on. %s",
                    place,
                    INSTEAD,
                )
                return


def _held_up_at(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> Iterator[str]:
    """The line of the user's that holds the loop, again and again until it answers."""
    answered = threading.Event()
    try:
        loop.call_soon_threadsafe(answered.set)
    except RuntimeError:  # closed meanwhile
        return
    while not answered.wait(BLOCKED_SECONDS) and thread.is_alive():
        frame, waited = _own_frame(thread), _seconds_waited(thread)
        at = frame and frame.f_lasti
        if answered.wait(SAME_SECONDS) or frame is None or _own_frame(thread) is not frame or frame.f_lasti != at:
            continue
        if _seconds_waited(thread) - waited < WAITED_SHARE * SAME_SECONDS:
            yield _line(frame)


def line_of(thread: threading.Thread) -> str | None:
    """The user's line that a thread is at; None where there is none, or a library computes below it."""
    frame = _own_frame(thread)
    return frame and _line(frame)


def _seconds_waited(thread: threading.Thread) -> float:
    """How long the thread could have run and got no processor, as Linux counts it; 0 elsewhere."""
    try:
        return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _own_frame(thread: threading.Thread) -> FrameType | None:
    """The innermost frame that is no library's.

    None where that one awaits: then a library computes below it, on a machine that is busy, and that is not the user's.
    """
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or dis.opname[frame.f_code.co_code[frame.f_lasti]] == "SEND":
        return None
    return frame


def _line(frame: FrameType) -> str:
    """`agent.py, line 12, in agent: time.sleep(1)`."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name}: {line}"
