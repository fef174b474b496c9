"""`python -m agentlightning.store.http.reader FD`: the process that reads large bodies; `elsewhere` starts it.

It answers one question after another, and ends when its socket does.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys

from agentlightning.importing import look_where_the_parent_does

LENGTHS = struct.Struct("<QQ")
"""Of a message, and of the body that follows it as it is."""
NICE = 5
"""Where there are too few cores, short requests go before large ones."""


def main(channel: socket.socket) -> None:
    look_where_the_parent_does()
    import msgspec

    from agentlightning.store.http.reading import Given, read

    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Given)
    while head := _received(channel, LENGTHS.size):
        said, follows = LENGTHS.unpack(head)
        given, body = decoder.decode(_received(channel, said)), _received(channel, follows)
        answer, parts = read(given, bytes(body))
        for message in (answer, *parts):
            data = encoder.encode(message)
            channel.sendall(LENGTHS.pack(len(data), 0) + data)
        del given, body, answer, parts


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
