"""`python -m agentlightning.gateway.large FD`: the process for large requests; started by the gateway alone.

It ends when its socket does. One question is answered at a time, so whatever comes meanwhile says to stop.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys

from agentlightning.importing import look_where_the_parent_does

NICE = 5
"""Where there are too few cores, short requests go before large ones."""


def main(channel: socket.socket) -> None:
    look_where_the_parent_does()
    from agentlightning.gateway.large.wire import LENGTHS, Stop, head_of, question_of
    from agentlightning.gateway.large.work import answer
    from agentlightning.gateway.limits import freeze_heap

    freeze_heap()
    stopped = select.poll()
    stopped.register(channel, select.POLLIN)
    while head := _received(channel, LENGTHS.size):
        said, follows = LENGTHS.unpack(head)
        question, body = question_of.decode(_received(channel, said)), _received(channel, follows)
        if not isinstance(question, Stop):
            channel.sendall(head_of(answer(question, body, lambda: bool(stopped.poll(0)))))
        del question, body


def _received(channel: socket.socket, size: int) -> bytearray:
    """So many bytes, or none where the socket ends."""
    buffer = bytearray(size)
    view, at = memoryview(buffer), 0
    while at < size:
        got = channel.recv_into(view[at:])
        if not got:
            return bytearray()
        at += got
    return buffer


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent, whose end is the socket's
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICE)
    main(socket.socket(fileno=int(sys.argv[1])))
