"""The child's reading end: a thread that turns what arrives on the socket into messages on a queue."""

from __future__ import annotations

import os
import queue
import socket
import threading

from agentlightning.backend.embedded.protocol import Frames, StopProcess, ToChild, to_child

_GRACE_SECONDS = 30.0
"""How long the work in hand may go on after the parent is gone."""


class Inbox:
    """Messages in the order they were sent. The parent's end, by `StopProcess` or by dying, reads as `StopProcess`."""

    def __init__(self, sock: socket.socket, *, in_a_process: bool = True) -> None:
        """`in_a_process`: the process is nothing but this server's, and ends when the work in hand never does."""
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
        frames = Frames()
        try:
            while data := self._receive():
                for body in frames.feed(data):
                    self._queue.put(to_child.decode(body))
        finally:
            self._queue.put(StopProcess())
        # Nobody is left to wait for a checkpoint being written, but half of one helps nobody either.
        if self._in_a_process:
            threading.Event().wait(_GRACE_SECONDS)
            os._exit(1)

    def _receive(self) -> bytes:
        try:
            return self._sock.recv(1 << 18)
        except OSError:  # reset by a parent that died: the same as its end
            return b""
