"""`python -m agentlightning.modelprocess FD`: the child's entry, started by `ModelProcess`; not a user's command."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys

from agentlightning.errors import AgentLightningError, missing_extra
from agentlightning.modelprocess.inbox import Inbox
from agentlightning.modelprocess.protocol import Refused, Settings, error_name, frame
from agentlightning.models import resolve_model


def main(descriptor: int) -> int:
    """Serve the parent at the other end of this socket until it says stop or is gone."""
    # The end of a service is told to all its processes; what it means for this one is the parent's decision. Where the
    # parent ends without a word, the socket does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    sock = socket.socket(fileno=descriptor)
    inbox = Inbox(sock)
    settings = inbox.wait()
    if not isinstance(settings, Settings):
        return 0
    try:
        resolve_model(settings.model)  # before the heavy imports: a wrong path is answered at once
        try:
            from agentlightning.modelprocess.server import Server
        except ModuleNotFoundError as error:
            raise missing_extra("torch", error.name or "torch") from None
        server = Server(settings, inbox, sock)
    except AgentLightningError as error:
        sock.sendall(frame(Refused(0, error_name(error), str(error))))
        return 1
    server.run()
    return 0


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking torch down in good order takes a second, and there is nothing left to lose
