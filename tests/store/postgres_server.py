"""A PostgreSQL server of the tests' own, where PostgreSQL is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PLACES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


def find_binaries() -> Path | None:
    """The directory with initdb and postgres."""
    found = shutil.which("initdb")
    return Path(found).parent if found else next(iter(PLACES), None)


@contextmanager
def postgres_server(binaries: Path, *, durable: bool = False) -> Iterator[str]:
    """The address of a fresh server that listens on a socket in a temporary folder only."""
    # PostgreSQL refuses to run as root, and its folder must belong to the user it runs as.
    as_root = os.geteuid() == 0
    prefix = ["runuser", "-u", "postgres", "--"] if as_root else []
    folder = tempfile.mkdtemp(prefix="agl-postgres-")
    if as_root:
        shutil.chown(folder, "postgres")
    data = f"{folder}/data"
    initdb = [str(binaries / "initdb"), "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"]
    subprocess.run([*prefix, *initdb], check=True, stdout=subprocess.DEVNULL)
    settings = [
        "-c",
        "listen_addresses=",
        "-c",
        f"unix_socket_directories={folder}",
        "-c",
        f"fsync={'on' if durable else 'off'}",
    ]
    process = subprocess.Popen([*prefix, str(binaries / "postgres"), "-D", data, *settings], stderr=subprocess.DEVNULL)
    try:
        _wait_until_up(folder)
        yield f"postgresql://postgres@/postgres?host={folder}"
    finally:
        subprocess.run([*prefix, str(binaries / "pg_ctl"), "-D", data, "-m", "immediate", "stop"], capture_output=True)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_up(folder: str) -> None:
    import psycopg

    for _ in range(200):
        try:
            psycopg.connect(f"postgresql://postgres@/postgres?host={folder}").close()
        except psycopg.OperationalError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError("PostgreSQL did not start.")
