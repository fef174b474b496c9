"""A helper process for tests: it answers each message with the message, after as many tenths of a second as it says."""

from __future__ import annotations

import os
import select
import socket

from agentlightning.net.helper_process import answer_the_parent, frame, frames


def main(channel: socket.socket) -> None:
    waiting = select.poll()
    waiting.register(channel, select.POLLIN)
    for message, body in frames(channel):
        if message == b"stop":
            continue
        if message == b"die":
            os._exit(3)
        waiting.poll(int(body[:4] or b"0") * 100)  # until something more is said
        channel.sendall(frame(bytes(message)))


if __name__ == "__main__":
    answer_the_parent(main)
