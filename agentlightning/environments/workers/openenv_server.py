# pyright: basic
"""The server of `openenv:MODULE:APP`: `openenv_server.py MODULE:APP` prints its port, and ends with its stdin.

The first line of stdin is the key that requests must have: nobody else on this machine plays. This runs where OpenEnv
is installed, and imports nothing of ours.
"""

from __future__ import annotations

import hmac
import importlib
import os
import socket
import sys
import threading
from typing import Any


def end_with_the_parent() -> None:
    """Its stdin is a pipe that ends when the process at its other end does, however that dies."""
    sys.stdin.buffer.read()
    os._exit(0)


class WithKey:
    """The application behind its key; without it a request is refused, and a WebSocket is not opened."""

    def __init__(self, application: Any, key: bytes) -> None:
        self._application, self._key = application, key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or hmac.compare_digest(dict(scope["headers"]).get(b"x-agl-key", b""), self._key):
            await self._application(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})


def _application(module: str, name: str) -> Any:
    """Ends with a line where there is no such module or no such name in it; what fails inside it is shown whole."""
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise SystemExit(f"There is no module '{error.name}' in this folder, and none is installed there.") from None
    except AttributeError:
        if module not in sys.modules or hasattr(sys.modules[module], name):
            raise
        raise SystemExit(f"The module '{module}' has no '{name}'.") from None


def main() -> None:
    key = sys.stdin.buffer.readline().strip()
    if not key:
        raise SystemExit("The first line of stdin is the key.")
    module, _, name = sys.argv[1].partition(":")
    application = _application(module, name or "app")
    import uvicorn

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()  # what connects from now on waits until the server is there
    threading.Thread(target=end_with_the_parent, daemon=True).start()
    sys.stdout.write(f"{listening.getsockname()[1]}\n")
    sys.stdout.flush()
    os.dup2(2, 1)  # what else is printed goes where errors go
    uvicorn.Server(uvicorn.Config(WithKey(application, key), log_level="warning")).run(sockets=[listening])


if __name__ == "__main__":
    main()
