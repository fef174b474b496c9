"""`python -m agentlightning.store.http.reader FD`: the process that reads large bodies; `body_process` starts it."""

from __future__ import annotations

import socket

from agentlightning.net.helper_process import answer_the_parent, frame, frames


def main(channel: socket.socket) -> None:
    import msgspec

    from agentlightning.store.http.reading import Given, read

    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Given)
    for message, body in frames(channel):
        answer, parts = read(decoder.decode(message), bytes(body))
        for piece in (answer, *parts):
            channel.sendall(frame(encoder.encode(piece)))
        del message, body, answer, parts


if __name__ == "__main__":
    answer_the_parent(main)
