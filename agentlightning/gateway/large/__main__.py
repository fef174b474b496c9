"""`python -m agentlightning.gateway.large FD`: the process for large requests; started by the gateway alone.

One question is answered at a time, so whatever comes meanwhile says to stop.
"""

from __future__ import annotations

import select
import socket

from agentlightning.net.helper_process import answer_the_parent, frame, frames


def main(channel: socket.socket) -> None:
    from agentlightning.gateway.large.wire import StopAnswering, question_of
    from agentlightning.gateway.large.work import answer
    from agentlightning.gateway.limits import freeze_heap

    freeze_heap()
    stopped = select.poll()
    stopped.register(channel, select.POLLIN)
    for message, body in frames(channel):
        question = question_of.decode(message)
        if not isinstance(question, StopAnswering):
            channel.sendall(frame(answer(question, body, lambda: bool(stopped.poll(0)))))
        del message, question, body


if __name__ == "__main__":
    answer_the_parent(main)
