"""The process on a machine of the cluster in which an engine or a rank of the learner lives, as a Ray actor.

Ray starts it and reports its end; its work comes over a socket, as it does to the embedded backend's processes, and
files go through Ray's object store. Processes share a machine's files if they find the same word in the same folder: an
address does not show that, as containers with a network in common have folders of their own.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import shutil
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from agentlightning.backend.ray.carry import Packed, checksums, digest_of, pack, unpack_once
from agentlightning.backend.ray.cluster import this_machine
from agentlightning.backend.vllm.worker.agl_vllm_worker import sums_of
from agentlightning.keys import new_key

WAIT_SECONDS = 300.0
"""How long it waits for whoever tells it what to do."""
KEY_SECONDS = 10.0
"""How long whoever connects may take to show the key."""


class Host:
    """An actor: `listen`, then `serve` or `follow`, which last as long as the work does."""

    def __init__(self, name: str, level: int, folder: str) -> None:
        """`folder` is for files on their way, of the same name on every machine."""
        logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", force=True)
        self._name = name
        self._key = new_key()
        self._door: socket.socket | None = None
        self._folder = Path(folder)
        self._weights = self._folder
        """Where weights are that were published."""

    def __repr__(self) -> str:
        return self._name  # what Ray puts before each line that it prints

    def listen(self, host: str | None = None) -> tuple[str, int, str, int, str]:
        """Where it waits, what it must be shown first, its process, and its machine: the same word for all hosts that
        see the same files. None: at this machine's address."""
        host = host or this_machine()
        self._door = socket.create_server((host, 0))
        return host, self._door.getsockname()[1], self._key, os.getpid(), self._machine()

    def _machine(self) -> str:
        return _machine_of(dict.fromkeys((self._folder, self._weights)))

    def serve(self) -> int:
        """Be a model process; 1 where the policies could not be loaded."""
        from agentlightning.backend.embedded.serve import serve

        return serve(self._accept(), in_a_process=True)

    def follow(self) -> int:
        """Be a further rank of the learner."""
        from agentlightning.backend.embedded.ranks import follow

        follow(self._accept())
        return 0

    def has(self, path: str, sums: dict[str, str]) -> bool:
        """Whether the very same folder is on this machine."""
        return Path(path).is_dir() and checksums(Path(path)) == sums

    def sums(self, name: str) -> dict[str, int]:
        """Checksums of the tensors in a folder of its own."""
        return sums_of(str(self._folder / name))

    def pack(self, name: str) -> Packed:
        """A folder of its own, which is then gone."""
        packed = pack(self._folder / name)
        shutil.rmtree(self._folder / name)
        return packed

    def unpack(self, packed: Packed, name: str, base: str | None = None) -> None:
        """Write files into a folder of its own, if they are not there; an adapter in it stands on `base`."""
        unpack_once(packed, self._folder / name, base)

    def take(self, packed: Packed, name: str) -> tuple[str, int]:
        """Write weights where every process of this machine reads them; where that is, and how many bytes they are.
        `drop` removes them."""
        folder = self._weights / f"{name}-{digest_of(packed.checksums)}"
        if folder.is_dir() and checksums(folder) != dict(packed.checksums):
            shutil.rmtree(folder)
        unpack_once(packed, folder)
        return str(folder), sum(content.nbytes for content in packed.files.values())

    def drop(self, path: str) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """All files of the run on this machine."""
        for folder in {self._folder, self._weights}:
            shutil.rmtree(folder, ignore_errors=True)

    def _accept(self) -> socket.socket:
        """The connection of whoever knows the key."""
        assert self._door is not None
        with self._door as door:
            door.settimeout(WAIT_SECONDS)
            while True:
                sock, _ = door.accept()
                sock.settimeout(KEY_SECONDS)
                try:
                    shown = _read(sock, len(self._key))
                except (
                    OSError
                ):  # whoever says nothing, or hangs up, must not end the wait for the one who knows the key
                    shown = b""
                if hmac.compare_digest(shown, self._key.encode()):
                    break
                sock.close()
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock


class LearnerRank(Host):
    """A rank of the learner. The name of the class is what Ray's pages show."""


class Porter(Host):
    """A process that computes nothing: it is there for the files on its machine."""


class EngineProcess(Host):
    """An engine. The name of the class is what Ray's pages show."""


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := sock.recv(count - len(data))):
        data += more
    return data


_MACHINE_FILE = ".machine"


def _machine_of(folders: Iterable[Path]) -> str:
    """A word that is the same for all processes which see the very same folders; the first of them makes it."""
    return "-".join(_word_in(folder) for folder in folders)


def _word_in(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    fresh, kept = folder / f"{_MACHINE_FILE}-{secrets.token_hex(8)}", folder / _MACHINE_FILE
    fresh.write_text(secrets.token_hex(8))
    with suppress(FileExistsError):  # a link appears whole, and never in place of another one
        os.link(fresh, kept)
    fresh.unlink()
    return kept.read_text()
