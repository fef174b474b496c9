"""`python -m agentlightning.backend.embedded [STDERR] FD`: the child's entry, started by `Child`."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys

from agentlightning.backend.embedded.serve import serve

if __name__ == "__main__":
    # The end of a service is told to all its processes; what it means for this one is the parent's decision. Where the
    # parent ends without a word, the socket does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    *terminal, given = map(int, sys.argv[1:])
    code = serve(socket.socket(fileno=given), in_a_process=True, terminal=terminal)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking torch down in good order takes a second, and there is nothing left to lose
