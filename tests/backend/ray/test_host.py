"""A host waits for the one who knows its key, whoever else connects."""

from __future__ import annotations

import logging
import socket
import threading
from pathlib import Path

import pytest

from agentlightning.backend.ray import host as module
from agentlightning.backend.ray.host import Host


def test_whoever_does_not_know_the_key_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEY_SECONDS", 0.2)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # a host sets up the logging of a process of its own
    host = Host("engine 0", 30, str(tmp_path))
    address, port, key, *_ = host.listen("127.0.0.1")
    found: list[socket.socket] = []
    waiting = threading.Thread(target=lambda: found.append(host._accept()))  # pyright: ignore[reportPrivateUsage]
    waiting.start()
    with (
        socket.create_connection((address, port)) as wrong,
        socket.create_connection((address, port)) as silent,
        socket.create_connection((address, port)) as right,
    ):
        wrong.sendall(b"0" * len(key))
        right.sendall(key.encode())
        waiting.join(timeout=60)
        assert wrong.recv(1) == b""
        assert silent.recv(1) == b""
        assert found[0].getpeername() == right.getsockname()
        found[0].close()
