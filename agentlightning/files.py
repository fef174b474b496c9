"""Writing files so that a process that dies at any line leaves either the old content or the new one."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from agentlightning.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows has no advisory locks of this kind; there nothing is held
    fcntl = None


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A temporary directory beside `path` that takes its place when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    work.chmod(0o755)
    try:
        yield work
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        work.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def atomic_write(path: Path, text: str) -> None:
    """Replace the content of a file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}.{os.getpid()}")
    work.write_text(text)
    work.replace(path)


def remove_tree(path: Path) -> None:
    """Remove a folder that others filled, as far as that goes; also one nested deeper than Python goes."""
    with suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        subprocess.run(["rm", "-rf", "--", str(path)], stderr=subprocess.DEVNULL, check=False)


@contextmanager
def shared_lock(path: Path) -> Iterator[None]:
    """Hold an existing file: `is_held` sees it from any process, and the holder's death releases it."""
    with open(path) as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def is_held(path: Path) -> bool:
    """Tell whether somebody holds a `shared_lock` on an existing file."""
    if fcntl is None:
        return False
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def local_path(uri: str | Path) -> str:
    """The path that a URI of weights or of an optimiser's state means: a path itself, or one behind `file://`.

    Raises ConfigError for places that are not on this machine.
    """
    scheme, separator, _ = str(uri).partition("://")
    if not separator:
        return str(uri)
    if scheme != "file":
        raise ConfigError(f"Nothing here reads or writes {scheme}://. Give a directory, for example on a shared disk.")
    return unquote(urlsplit(str(uri)).path)
