"""Writing files so that a process that dies at any line leaves either the old content or the new one.

What a run writes is its owner's alone, whatever the umask: it holds what agents said. `AGL_UMASK` lets others in.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from agentlightning.errors import ConfigError
from agentlightning.keys import redacted

try:
    import fcntl
except ImportError:  # Windows has no advisory locks of this kind; there nothing is held
    fcntl = None


UMASK = "AGL_UMASK"


def reason_of_file(error: Exception) -> str:
    """Why a file could not be used, without its name, which stands beside it."""
    return str((isinstance(error, OSError) and error.strerror) or error).rstrip(".")


def no_path(given: str) -> str:
    """Why a text is no path of this machine, and what to give; nothing for one that may be."""
    if os.path.exists(given):
        return ""
    if re.search(r"\$\{?[A-Za-z_]|%[A-Za-z_]+%", given):
        return "The variable in it is not filled in: give os.path.expandvars(…) of it, or the path itself."
    if of_a_file := re.match(r"file:/+(?:localhost/)?", given):
        return f"Give the path alone: '/{given[of_a_file.end() :]}'."
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", given) and not given.startswith(("http:", "https:")):  # a Path has one /
        return "That is an address, and here a path of this machine is needed: download or mount it first."
    return ""


def run_called(name: str | Path) -> Path | None:
    """The run in `runs/` that has this name; None where there is none."""
    run = Path("runs") / name
    return run if (run / "run.json").is_file() else None


def with_the_latest(command: str, runs: int = 1) -> str:
    """The sentence with the command and the runs in `runs/` that began last; nothing where there are fewer."""
    described = sorted(Path("runs").glob("*/run.json"), key=lambda file: file.stat().st_mtime)[-runs:]
    latest = " ".join(quote(str(file.parent)) for file in described)
    return f" The latest {'ones' if runs > 1 else 'one'} here: agl {command} {latest}" if described[runs - 1 :] else ""


def meant_by(path: Path, endings: Collection[str] = ()) -> str:
    """The file or folder that is there and was probably meant, as a question; nothing where none is like it.

    With `endings` only files that end so are looked at.
    """
    if path.exists():  # it is of another kind
        return ""
    if "\\" in str(path) and Path(slashes := str(path).replace("\\", "/")).exists():
        return f" Folders stand behind / here: {slashes}"
    if run := run_called(path):
        return f" Did you mean {run}?"
    places = sorted(path.parent.iterdir(), key=lambda p: p.suffix == path.suffix) if path.parent.is_dir() else []
    by_stem = {
        place.stem: place for place in places if not endings or place.suffix in endings
    }  # endings alone are alike in many files
    like = difflib.get_close_matches(path.stem, by_stem, n=1, cutoff=0.7)
    return f" Did you mean {by_stem[like[0]]}?" if like else ""


def text_of(path: Path, what: str) -> str:
    """The text of a file that `what` names, for example --edit user=@FILE. Raises ConfigError where it is none."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} cannot be read: {reason_of_file(error)}. Name a file of text in UTF-8.") from error


def _allowed(most: int) -> int:
    """The permissions of a new file (`most` 0o666) or folder (0o777). Raises ConfigError for an unfit AGL_UMASK."""
    given = os.environ.get(UMASK) or "077"
    if not re.fullmatch("0?[0-7]{3}", given):
        raise ConfigError(f"{UMASK} is {given!r}. Give three octal digits: 007 lets a group in, 077 nobody.")
    return most & ~int(given, 8)


def open_private(path: str | Path, mode: str, *, encoding: str | None = None) -> IO[Any]:
    """`open` for files that a run writes: those that are new get the permissions of `AGL_UMASK`. Raises ConfigError for
    a link, which a run's folder that was copied from elsewhere may have to any file here."""
    return open(path, mode, encoding=encoding, opener=_opened)


def refuse_link(path: str | Path) -> None:
    """Raises ConfigError for a link in the place of a file that is written."""
    if os.path.islink(path):
        raise ConfigError(f"{path} is a link, and a run writes through none. Take it away, and try again.")


def _opened(name: str, flags: int) -> int:
    is_new = not os.path.lexists(name)
    refuse_link(name)
    file = os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)
    if is_new:
        os.chmod(name, _allowed(0o666))
    return file


def make_folder(path: Path, *, new: bool = False) -> None:
    """Make a folder of a run, and those that it is in; what is there stays as it is. Raises FileExistsError for a `new`
    one that is there."""
    for folder in reversed([p for p in (path, *path.parents) if not p.exists() or (new and p == path)]):
        folder.mkdir(mode=0o700, exist_ok=not (new and folder == path))
        folder.chmod(_allowed(0o777))


@contextmanager
def atomic_directory(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """A temporary directory beside `path` that takes its place when the block ends without an error.

    What is `shared` is for others to read: a model that was exported.
    """
    path.parent.mkdir(parents=True, exist_ok=True) if shared else make_folder(path.parent)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    work.chmod(0o755 if shared else _allowed(0o777))
    try:
        yield work
        if not shared:
            for inside in work.rglob("*"):
                inside.chmod(_allowed(0o777 if inside.is_dir() else 0o666))
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        work.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def atomic_write(path: Path, text: str) -> None:
    """Replace the content of a file in one step. A key that was given out stands in none whole. Raises OSError that
    names the file where the disk does not take it; then the old content stays, and nothing else."""
    make_folder(path.parent)
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        work.unlink(missing_ok=True)
        with open_private(work, "x") as file:
            file.write(redacted(text))
        work.replace(path)
    except OSError as error:
        with suppress(OSError):
            work.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def remove_tree(path: Path) -> None:
    """Remove a folder that others filled, as far as that goes; also one nested deeper than Python goes, or whose
    folders forbid it."""
    with suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(path)], stderr=subprocess.DEVNULL, check=False)


def copy_tree(path: Path, copy: Path) -> None:
    """Copy a folder that others filled, without what cannot be read or has too long a path."""
    copy.mkdir()
    try:
        shutil.copytree(path, copy, symlinks=True, ignore=_not_copied, copy_function=_copy_file, dirs_exist_ok=True)
    except OSError as error:
        reasons = [reason for *_, reason in error.args[0]] if isinstance(error, shutil.Error) else [str(error)]
        if not all(reason.startswith(_THEIRS) for reason in reasons):
            raise


def _copy_file(source: str, target: str) -> None:
    """A file with holes stays one: others may leave terabytes of them."""
    status = os.lstat(source)
    if status.st_blocks * 512 < status.st_size and os.access(source, os.R_OK):
        subprocess.run(["cp", "-p", "--", source, target], capture_output=True, check=True)
    else:
        shutil.copy2(source, target)


def _not_copied(folder: str, names: list[str]) -> list[str]:
    """Pipes and sockets, which would hold a reader up, and what lies deeper than copying goes."""
    if folder.count(os.sep) > _DEEPEST:
        return names
    modes = {name: os.lstat(os.path.join(folder, name)).st_mode for name in names}
    return [
        name for name, mode in modes.items() if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))
    ]


_DEEPEST = 200
_THEIRS = tuple(f"[Errno {number}]" for number in (errno.EACCES, errno.ENAMETOOLONG))
"""Failures that whoever filled a folder can bring about. Others, as of a full disk, are no reason to copy less."""


def _at_once(name: str, flags: int) -> int:
    """Opens without waiting for who writes into a pipe that somebody put there."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


@contextmanager
def shared_lock(path: Path) -> Iterator[None]:
    """Hold an existing file: `is_held` sees it from any process, and the holder's death releases it. Where the file
    system has no locks nothing is held, and `is_held` takes every file for one that is."""
    with open(path, opener=_at_once) as file:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_SH)
        yield


def is_held(path: Path) -> bool:
    """Tell whether somebody holds a `shared_lock` on an existing file."""
    if fcntl is None:
        return False
    with open(path, opener=_at_once) as file:
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


def folder_bytes(folder: Path) -> int:
    """The size of all files below a folder; of those that are removed meanwhile, nothing."""
    found = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            found += file.lstat().st_size if file.is_file() else 0
    return found
