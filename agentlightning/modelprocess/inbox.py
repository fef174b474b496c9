"""The child's reading end: a thread that turns what arrives on the socket into messages on a queue."""

from __future__ import annotations

import os
import queue
import socket
import threading

from agentlightning.modelprocess.protocol import Frames, Stop, ToChild, to_child

_GRACE_SECONDS = 30.0
"""How long the work in hand may go on after the parent is gone."""


class Inbox:
    """Messages in the order they were sent. The parent's end, by `Stop` or by dying, reads as `Stop`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._queue: queue.SimpleQueue[ToChild] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def wait(self) -> ToChild:
        """The next message, as soon as there is one."""
        return self._queue.get()

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
            self._queue.put(Stop())
        # Nobody is left to wait for a checkpoint being written, but half of one helps nobody either.
        threading.Event().wait(_GRACE_SECONDS)
        os._exit(1)

    def _receive(self) -> bytes:
        try:
            return self._sock.recv(1 << 18)
        except OSError:  # reset by a parent that died: the same as its end
            return b""
