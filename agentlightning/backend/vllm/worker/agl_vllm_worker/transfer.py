"""A directory that goes to several processes at once, by broadcasts of torch.distributed: the group, and both its ends.

vLLM's workers receive, and `python transfer.py` sends, so this needs PyTorch and nothing else. A group is made for one
directory and ends with it: nobody must be told of a member that died, or of one that began again. Each wait ends after
`Terms.seconds`. What is received are the sender's files byte by byte, or an exception.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

BUCKET = 64 << 20
"""Bytes of one broadcast at most."""
_LOOK_SECONDS = 0.0005
_PATIENCE = 10
"""NCCL's own watchdog, which ends the process, waits so many times as long as we do."""


@dataclass(frozen=True)
class Terms:
    """What all members of a group know of it. The sender is rank 0, and listens."""

    host: str
    port: int
    size: int
    """How many members it has."""
    backend: str
    """"gloo", through the memory of machines, or "nccl", through that of GPUs."""
    seconds: float
    """How long one may wait for the others: at the beginning, and for each bucket."""
    files: tuple[tuple[str, int], ...]
    """Names and bytes, in the order in which they are sent."""

    @classmethod
    def parse(cls, text: str) -> Terms:
        found = json.loads(text)
        return cls(**{**found, "files": tuple((name, size) for name, size in found["files"])})

    def dump(self) -> str:
        return json.dumps(asdict(self))


def files_of(folder: Path) -> tuple[tuple[str, int], ...]:
    """`Terms.files` of what is in a directory."""
    return tuple((path.name, path.stat().st_size) for path in sorted(folder.iterdir()) if path.is_file())


class TransferGroup:
    """The members while they are connected. It is no part of what torch.distributed knows of the process."""

    def __init__(self, terms: Terms, rank: int, listener: socket.socket | None = None) -> None:
        """Wait for all members. Rank 0 brings the socket at which it listens."""
        import torch
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        limit = timedelta(seconds=terms.seconds)
        listening: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener.detach()}
        self._store = TCPStore(
            terms.host, terms.port, terms.size, listener is not None, limit, wait_for_workers=False, **listening
        )
        # A group that lacks a member is not begun: NCCL would wait for it without an end.
        self._store.set(f"here-{rank}", "")
        self._store.wait([f"here-{member}" for member in range(terms.size)], limit)
        self._seconds = terms.seconds
        self._on_gpu = terms.backend == "nccl"
        self._group: Any = (_nccl if self._on_gpu else _gloo)(self._store, rank, terms)
        largest = min(BUCKET, max((size for _, size in terms.files), default=0))
        self._host = torch.empty(largest, dtype=torch.uint8, pin_memory=self._on_gpu)
        """What is read from a file and written to one."""
        self._bucket = self._host.cuda() if self._on_gpu else self._host
        """What is broadcast."""

    def send(self, source: BinaryIO, size: int) -> None:
        """So many bytes of a file, to all others."""
        for count in _buckets(size):
            if source.readinto(self._view(count)) != count:  # pyright: ignore[reportAttributeAccessIssue]
                raise OSError(f"{source.name} is shorter than it was")
            if self._on_gpu:
                self._bucket.copy_(self._host)
            self._broadcast(count)

    def receive(self, target: BinaryIO, size: int) -> None:
        """So many bytes of rank 0's, into a file."""
        for count in _buckets(size):
            self._broadcast(count)
            if self._on_gpu:
                self._host.copy_(self._bucket)
            target.write(self._view(count))

    def _view(self, count: int) -> memoryview:
        return memoryview(self._host.numpy().data)[:count]

    def _broadcast(self, count: int) -> None:
        """Of rank 0, which is what torch.distributed takes by itself."""
        work = self._group.broadcast([self._bucket[:count]])
        last = time.monotonic() + self._seconds
        while not work.is_completed():
            if time.monotonic() > last:
                raise TimeoutError(f"a broadcast did not end within {self._seconds:g} s")
            time.sleep(_LOOK_SECONDS)
        work.wait()  # raises what went wrong

    def close(self) -> None:
        """The others learn at once that this member is gone."""
        self._group.abort()
        del self._group, self._store


def _gloo(store: Any, rank: int, terms: Terms) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # pyright: ignore
    options._timeout = timedelta(seconds=terms.seconds)
    options._devices = [ProcessGroupGloo.create_device(hostname=own_address(terms.host))]
    return ProcessGroupGloo(store, rank, terms.size, options)


def _nccl(store: Any, rank: int, terms: Terms) -> Any:
    from torch.distributed import ProcessGroupNCCL  # pyright: ignore[reportAttributeAccessIssue]

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=_PATIENCE * terms.seconds)
    return ProcessGroupNCCL(store, rank, terms.size, options)


def own_address(host: str) -> str:
    """This machine's, in the network in which that host is."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return probe.getsockname()[0]


def _buckets(size: int) -> Iterator[int]:
    """How many bytes each has."""
    for begin in range(0, size, BUCKET):
        yield min(BUCKET, size - begin)


def send(terms: Terms, listener: socket.socket, folder: Path) -> None:
    group = TransferGroup(terms, 0, listener)
    try:
        for name, size in terms.files:
            with (folder / name).open("rb", buffering=0) as source:
                group.send(source, size)  # pyright: ignore[reportArgumentType]
    finally:
        group.close()


def receive(terms: Terms, rank: int, folder: Path) -> None:
    """Into a directory that is made, or made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    group = TransferGroup(terms, rank)
    try:
        for name, size in terms.files:
            with (folder / Path(name).name).open("wb") as target:
                group.receive(target, size)
    finally:
        group.close()


def main() -> None:
    """The sender. For each line of JSON that comes in, with a folder and what of the terms is known: a line with the
    port, which completes them; and, when all was sent, an empty one. It ends with what goes wrong, and says so."""
    import torch  # noqa: F401 - seconds, of which nobody who waits for a port knows

    for line in sys.stdin:
        request = json.loads(line)
        with socket.create_server((request["terms"]["host"], 0)) as listener:
            port = listener.getsockname()[1]
            _say({"port": port})
            terms = Terms.parse(json.dumps({**request["terms"], "port": port}))
            try:
                send(terms, listener, Path(request["folder"]))
            except Exception as error:  # at the top of the program: whoever started it must know
                _say({"error": f"{type(error).__name__}: {error}"})
                raise SystemExit(1) from None
            _say({})


def _say(words: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
