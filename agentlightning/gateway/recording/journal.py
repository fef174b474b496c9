"""The journal: which attempts are being answered, or have answers that are not stored yet, in a file that a killed
gateway leaves behind.

The invariant: an attempt is in the file before its agent sees anything of an answer, and until all of it is stored. So
the next gateway knows whose calls are lost, and that nobody else's are. Each change is one short write to the system's
cache: it outlives the process, but not a crash of the machine; then the file says nothing, and the gateway is another.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from agentlightning.errors import GatewayError, StoreUnavailableError
from agentlightning.types.ids import random_hex

try:
    import fcntl
except ImportError:  # Windows has no advisory locks of this kind; there nothing is held
    fcntl = None

Owner = tuple[str, str]
"""A rollout and an attempt."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LARGE = 2**18
_IN, _OUT = b"+", b"-"


class _Head(msgspec.Struct, frozen=True):
    """The first line: who remembers, and since which start of the machine."""

    instance: str
    boot: str


class CallJournal:
    """Belongs to one gateway at a time."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file = -1
        self._size = 0
        self._longest = _LARGE
        """Bytes beyond which the file is shortened: at least twice those that it needs."""
        self._head = b""
        self._held: Counter[Owner] = Counter()

    def open(self) -> tuple[str, Collection[Owner]]:
        """The instance that the gateway continues, and the attempts whose answers its predecessor had not stored; they
        stay in the file until `settle`.

        Raises GatewayError if another gateway uses the file, or it cannot be written.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._opened(self._path)
            head, owners = _read(self._path.read_bytes())
        except OSError as error:
            self.close()
            raise GatewayError(
                f"The gateway's journal {self._path} cannot be used: {error.strerror}. Each gateway needs a file of "
                "its own, which only it may write."
            ) from error
        if head is None or head.boot != _boot():
            head, owners = _Head(random_hex(8), _boot()), ()
        self._head = msgspec.json.encode(head) + b"\n"
        return head.instance, owners

    def hold(self, owner: Owner) -> None:
        """An answer of this attempt begins, or is to be stored. Each needs a `release` of its own.

        Raises StoreUnavailableError, and holds nothing, if the file cannot be written.
        """
        self._held[owner] += 1  # before its line is written, after which the file may be replaced by who is held
        if self._held[owner] > 1:
            return
        try:
            self._write(_line(_IN, owner))
        except OSError as error:
            del self._held[owner]
            raise StoreUnavailableError(
                f"The gateway's journal {self._path} cannot be written: {error.strerror}. Is the disk full?"
            ) from error

    def release(self, owners: Iterable[Owner]) -> None:
        """So many answers of these attempts are stored, or nothing of them was seen."""
        gone = []
        for owner in owners:
            self._held[owner] -= 1
            if not self._held[owner]:
                del self._held[owner]
                gone.append(_line(_OUT, owner))
        with suppress(OSError):  # who stays in the file is done again needlessly, and a damaged file vouches for nobody
            if gone and not self._held:
                self.settle()
            elif gone:
                self._write(b"".join(gone))

    def settle(self) -> None:
        """Nobody is in the file any more."""
        os.ftruncate(self._file, 0)
        self._size = os.write(self._file, self._head)
        self._longest = _LARGE

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, lines: bytes) -> None:
        written = os.write(self._file, lines)
        self._size += written
        if written < len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._size > self._longest:
            self._shorten()

    def _shorten(self) -> None:
        """Replace the file by one that says the same; whoever dies meanwhile leaves one of the two. If there is no room
        for it the file stays as it is."""
        work = self._path.with_name(f".{self._path.name}.new")
        content = b"".join([self._head, *(_line(_IN, owner) for owner in self._held)])
        self._longest = max(_LARGE, 2 * len(content))
        work.unlink(missing_ok=True)
        shorter = self._opened(work)
        if _written(shorter, content) < len(content):
            os.close(shorter)
            return
        self._size = len(content)
        work.replace(self._path)
        self.close()
        self._file = shorter

    @staticmethod
    def _opened(path: Path) -> int:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise
        return file


def _written(file: int, content: bytes) -> int:
    """How many bytes of the content could be written."""
    try:
        return os.write(file, content)
    except OSError:
        return 0


def _line(change: bytes, owner: Owner) -> bytes:
    return change + msgspec.json.encode(owner) + b"\n"


def _boot() -> str:
    return _BOOT.read_text().strip() if _BOOT.exists() else ""


def _read(content: bytes) -> tuple[_Head | None, Collection[Owner]]:
    """What a journal holds; no head if it is damaged."""
    lines = content.splitlines()
    owners: dict[Owner, None] = {}
    try:
        head = msgspec.json.decode(lines[0], type=_Head)
        for line in lines[1:]:
            owner = msgspec.json.decode(line[1:], type=Owner)
            if line[:1] == _IN:
                owners[owner] = None
            else:
                owners.pop(owner, None)
    except (IndexError, msgspec.DecodeError):
        return None, ()
    return head, owners
