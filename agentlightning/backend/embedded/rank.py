"""`python -m agentlightning.backend.embedded.rank FD`: a learner's further rank, started by rank 0; not for users."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys

from agentlightning.backend.embedded.ranks import follow

if __name__ == "__main__":
    # As for the model process: what a signal means is decided by the parent, whose end closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    code = 1
    try:
        follow(socket.socket(fileno=int(sys.argv[1])))
        code = 0
    except Exception:
        logging.exception("A learner's rank failed")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
