"""The child's reading end: a thread that turns what arrives on the socket into messages on a queue."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from agentlightning.backend.embedded.protocol import Frames, StopProcess, ToChild, to_child

_GRACE_SECONDS = 30.0
"""How long the work in hand may go on after the parent is gone."""

_DIED = (
    b"\n! The main process ended without a word: killed (by the system where memory runs out, by a terminal that "
    b"closed; nohup or tmux keeps a run), or ended by the agent (os._exit, a crash in a library). Of a run,  agl why "
    b"RUN  says how to go on; agl runs lists them.\n"
)


class Inbox:
    """Messages in the order they were sent. The parent's end, by `StopProcess` or by dying, reads as `StopProcess`."""

    def __init__(self, sock: socket.socket, *, in_a_process: bool = True, terminal: Sequence[int] = ()) -> None:
        """`in_a_process`: the process is nothing but this server's, and ends when the work in hand never does.
        `terminal`: where it is said that the parent died, the parent's own stderr.
        """
        self._terminal = terminal
        self._sock = sock
        self._in_a_process = in_a_process
        self._queue: queue.SimpleQueue[ToChild] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def wait(self, timeout: float | None = None) -> ToChild | None:
        """The next message, as soon as there is one; None if there was none for `timeout` seconds."""
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return None

    def poll(self) -> ToChild | None:
        """The next message, if there is one."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    def _read(self) -> None:
        frames, stopped = Frames(), False
        try:
            while data := self._receive():
                for body in frames.feed(data):
                    self._queue.put(message := to_child.decode(body))
                    stopped = stopped or isinstance(message, StopProcess)
            if not stopped:
                self._say_that_it_died()
        finally:
            self._queue.put(StopProcess())
        # Nobody is left to wait for a checkpoint being written, but half of one helps nobody either.
        if self._in_a_process:
            threading.Event().wait(_GRACE_SECONDS)
            os._exit(1)

    def _say_that_it_died(self) -> None:
        for terminal in self._terminal:
            with suppress(OSError):
                os.write(terminal, _DIED)

    def _receive(self) -> bytes:
        try:
            return self._sock.recv(1 << 18)
        except OSError:  # reset by a parent that died: the same as its end
            return b""
