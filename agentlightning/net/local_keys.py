"""Keys that servers make where none is given, so that other people of this machine cannot use what listens on loopback.

A server makes one at each start and keeps it in a file that only its owner may read, named after the port, for as long
as it runs. The owner's own clients look there when they are given no key for an address of this machine. A file that a
killed server leaves behind opens nothing: the next one makes another key.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from agentlightning.keys import new_key
from agentlightning.net.guard import is_local_name

logger = logging.getLogger(__name__)

_DEFAULT_PORTS = {"http": 80, "https": 443}


def made_key(given: str | None, host: str, *, open_to_all: bool = False) -> str | None:
    """A new key for a server on loopback that is given none; None where one is given, or wanted by nobody.

    Other addresses are refused without a key elsewhere.
    """
    return new_key() if given is None and not open_to_all and is_local_name(host) else None


@contextmanager
def kept_key(port: int, key: str | None) -> Iterator[None]:
    """Let this user's programs find the key of the server at a port, for the length of the block, if it made one."""
    if key is None:
        yield
        return
    file = _file_of(port)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(file, key)
    except OSError as error:  # no home, or one that cannot be written: then clients are given the key by hand
        logger.warning("The key cannot be kept in %s (%s); give it to the clients.", file, error)
    try:
        yield
    finally:
        with suppress(OSError):
            if file.read_text() == key:
                file.unlink()


def find_key(url: str) -> str | None:
    """The key that a server of this user made, if the address is one of this machine and such a server is there."""
    try:
        parts = urlsplit(url)
        port = parts.port or _DEFAULT_PORTS[parts.scheme]
        if not is_local_name((parts.hostname or "").lower()):
            return None
        return _file_of(port).read_text().strip() or None
    except (OSError, ValueError, KeyError):  # the usual case: there is none
        return None


def _file_of(port: int) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "agentlightning" / "keys" / str(port)


def _write(file: Path, key: str) -> None:
    """In one step, readable by its owner from the first moment on."""
    work = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with open(work, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as opened:
        opened.write(key)
    work.replace(file)
