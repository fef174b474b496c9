"""Serving the parent at the other end of a socket: settings first, then everything else. Imports torch when it must."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from agentlightning.backend.embedded.inbox import Inbox
from agentlightning.backend.embedded.protocol import CallFailed, ProcessSettings, error_name, frame, is_out_of_memory
from agentlightning.errors import AgentLightningError, missing_extra
from agentlightning.models import resolve_model

_NO_MEMORY = (
    "There is not enough memory for '{model}' and its cache ({error}).\n"
    "agl plan --model '{model}' says what it needs. End other programs, raise the limit (ulimit -v, a container's), or "
    "take a smaller model."
)


def serve(sock: socket.socket, *, in_a_process: bool, terminal: Sequence[int] = ()) -> int:
    """Serve until the parent says stop or is gone. 0, or 1 where the policies could not be loaded.

    terminal: the parent's stderr, where it has one.
    """
    inbox = Inbox(sock, in_a_process=in_a_process, terminal=terminal)
    settings = inbox.wait()
    if not isinstance(settings, ProcessSettings):
        return 0
    try:
        resolve_model(settings.model)  # before the heavy imports: a wrong path is answered at once
        try:
            from agentlightning.backend.embedded.server import ModelServer
        except ModuleNotFoundError as error:
            raise missing_extra("torch", error.name or "torch") from None
        server = ModelServer(settings, inbox, sock)
    except AgentLightningError as error:
        sock.sendall(frame(CallFailed(0, error_name(error), str(error))))
        return 1
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        sock.sendall(
            frame(
                CallFailed(0, "EngineError", _NO_MEMORY.format(model=settings.model, error=str(error) or "MemoryError"))
            )
        )
        return 1
    server.run()
    return 0
