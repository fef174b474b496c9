"""A PostgreSQL server of the tests' own, where PostgreSQL is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PLACES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


def find_binaries() -> Path | None:
    """The directory with initdb and postgres."""
    found = shutil.which("initdb")
    return Path(found).parent if found else next(iter(PLACES), None)


class PostgresServer:
    """A server with a fresh folder, which listens on a socket there only."""

    def __init__(self, binaries: Path, *, durable: bool = False) -> None:
        # PostgreSQL refuses to run as root, and its folder must belong to the user it runs as.
        as_root = os.geteuid() == 0
        self._prefix = ["runuser", "-u", "postgres", "--"] if as_root else []
        self._binaries = binaries
        self._folder = tempfile.mkdtemp(prefix="agl-postgres-")
        if as_root:
            shutil.chown(self._folder, "postgres")
        self._data = f"{self._folder}/data"
        self._settings = {"listen_addresses": "", "unix_socket_directories": self._folder}
        self._settings["fsync"] = "on" if durable else "off"
        initdb = [str(binaries / "initdb"), "-D", self._data, "-U", "postgres", "-A", "trust", "-E", "UTF8"]
        subprocess.run([*self._prefix, *initdb, "--no-sync"], check=True, stdout=subprocess.DEVNULL)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"postgresql://postgres@/postgres?host={self._folder}"

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        import psycopg

        settings = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        command = [*self._prefix, str(self._binaries / "postgres"), "-D", self._data, *settings]
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            # It ends at once where a process of one that was killed still holds its memory.
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            try:
                psycopg.connect(self.address).close()
            except psycopg.OperationalError:
                time.sleep(0.05)
            else:
                return
        raise RuntimeError("PostgreSQL did not start.")

    def kill(self) -> None:
        """kill -9 of all of its processes."""
        import psutil

        assert self._process is not None
        top = psutil.Process(self._process.pid)
        for process in [*top.children(recursive=True), top]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        Path(self._data, "postmaster.pid").unlink(missing_ok=True)

    def close(self) -> None:
        """End it, and remove its folder."""
        if self._process is not None:
            stop = [str(self._binaries / "pg_ctl"), "-D", self._data, "-m", "immediate", "stop"]
            subprocess.run([*self._prefix, *stop], capture_output=True)
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def postgres_server(binaries: Path, *, durable: bool = False) -> Iterator[str]:
    """The address of a fresh server."""
    server = PostgresServer(binaries, durable=durable)
    try:
        server.start()
        yield server.address
    finally:
        server.close()
