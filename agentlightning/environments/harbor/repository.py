"""Folders of a git repository at a commit, each fetched once into a cache: data, of which nothing is run.

A repository is a stranger's. git gets https, ssh and file alone, runs no hooks and asks for no password. A folder gets
its place in the cache by one rename, so that it is whole there whoever else fetches it, and whatever kills a fetch. A
link that leaves its folder is refused.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from agentlightning.errors import ConfigError
from agentlightning.files import make_folder, remove_tree

logger = logging.getLogger(__name__)

_SECONDS = 1800.0
"""The longest that git may take for one command."""
_ABANDONED_SECONDS = 86_400.0
"""After so long, what a killed fetch left in the cache is removed by another one."""
_PROTOCOLS = ("https", "ssh", "file")
_SSH = re.compile(r"\w[\w.-]*@[\w.-]+:(?!/?/)[\w./~-]+")
"""How git writes ssh without a scheme: git@example.com:team/tasks.git"""
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_SPECIAL = re.compile(r"([*?\[\]\\!# ])")
_SETTINGS = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.askPass=",
    "core.autocrlf=false",
    "credential.interactive=false",
    "submodule.recurse=false",
    "fetch.recurseSubmodules=false",
    "gc.auto=0",
    "maintenance.auto=false",
    "http.lowSpeedLimit=1000",
    "http.lowSpeedTime=60",
)
_KEPT = re.compile(r"(?!GIT_)|GIT_(SSH|SSL_|PROXY_|CONFIG_(GLOBAL|SYSTEM|NOSYSTEM)$)")
"""Variables that git sees: a repository that we may be called from is none of its business."""
_OWN = {
    "GIT_ALLOW_PROTOCOL": ":".join(_PROTOCOLS),
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "",
    "SSH_ASKPASS": "",
    "SSH_ASKPASS_REQUIRE": "never",
    "LC_ALL": "C",
}


def cache_folder() -> Path:
    """Where what Harbor's registries name is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "agentlightning" / "harbor"


def in_this_cache(folder: Path) -> Path:
    """A folder, or what stands for it in this machine's cache where it lies in that of another one and is not here."""
    parts, cache = folder.parts, cache_folder()
    for number in range(len(parts) - 1):
        own = cache.joinpath(*parts[number + 2 :])
        if parts[number : number + 2] == cache.parts[-2:] and not folder.is_dir() and own.is_dir():
            return own
    return folder


def fetched(url: str, commit: str | None, paths: Sequence[str]) -> list[Path]:
    """The folders at these paths of a repository, from the cache or else fetched, in their order.

    Args:
        url: Of the repository: https://, ssh:// or file://, or as ssh writes it (git@host:path).
        commit: A whole commit id, or the name of a branch or a tag; the newest commit where none is given.
        paths: Folders in the repository, as `inside` checks them.

    Raises ConfigError that names the repository, and the commit or the path that is not there.
    """
    shown = _checked(url)
    whole = commit if commit is not None and _COMMIT.fullmatch(commit) else _commit_of(url, commit, shown)
    name = re.sub(r"\W+", "-", PurePosixPath(urlsplit(url).path or url).name.removesuffix(".git")) or "repository"
    root = cache_folder() / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:12]}" / whole
    missing = [path for path in dict.fromkeys(paths) if not (root / path).is_dir()]
    if missing:
        logger.info("Fetching %d folders of %s at %s.", len(missing), shown, whole[:12])
        make_folder(root)
        with _checkout(root.parent, url, whole, missing, shown) as work:
            for path in missing:
                _take(work, path, root, f"{shown} at {whole[:12]}")
    return [root / path for path in paths]


def inside(path: str) -> str:
    """A path in a repository, written the usual way. Raises ValueError for one that leaves it."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or ".git" in (part.lower() for part in parts):
        raise ValueError(f"{path!r} is no folder inside of the repository")
    if re.search(r"[\x00-\x1f\\]", path):
        raise ValueError(f"{path!r} has characters that a path may not have")
    return str(PurePosixPath(*parts))


def _checked(url: str) -> str:
    """The URL as it is shown, without a password. Raises ConfigError for one that git is not given."""
    parts = urlsplit(url)
    if not _SSH.fullmatch(url) and (parts.scheme not in _PROTOCOLS or re.search(r"[\x00-\x20]", url)):
        known = ", ".join(f"{one}://" for one in _PROTOCOLS)
        raise ConfigError(f"The repository {url!r} is not fetched: its URL has to begin with one of {known}.")
    if parts.password is None and (parts.scheme != "https" or parts.username is None):
        return url
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _commit_of(url: str, name: str | None, shown: str) -> str:
    """The commit that a branch or a tag means now; the newest one of the default branch where no name is given."""
    printed = _git("ls-remote", "--quiet", "--", url, why=f"{shown} cannot be reached")
    found = {ref: commit for commit, ref in (line.split("\t", 1) for line in printed.splitlines() if "\t" in line)}
    named = [f"refs/tags/{name}^{{}}", f"refs/tags/{name}", f"refs/heads/{name}"]
    wanted = ["HEAD"] if name in (None, "HEAD", "head") else named
    commit = next((found[ref] for ref in wanted if ref in found), None)
    if commit is None or not _COMMIT.fullmatch(commit):
        what = "commit" if name is None else f"branch or tag {name!r}, and a commit has 40 digits"
        raise ConfigError(f"{shown} has no {what}.")
    return commit


@contextmanager
def _checkout(parent: Path, url: str, commit: str, paths: Sequence[str], shown: str) -> Iterator[Path]:
    """A temporary working tree with these paths of a commit, and nothing else of the repository."""
    for old in parent.glob(".fetching-*"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > _ABANDONED_SECONDS:
                remove_tree(old)
    work = Path(tempfile.mkdtemp(prefix=".fetching-", dir=parent))
    try:
        at = ("-C", str(work))
        _git("init", "--quiet", "--template=", str(work), why="git cannot make a repository")
        (work / ".git" / "info").mkdir(exist_ok=True)
        wanted = "".join("/" + _SPECIAL.sub(r"\\\1", path) + "/\n" for path in paths)
        (work / ".git" / "info" / "sparse-checkout").write_text(wanted, "utf-8")
        _git(*at, "config", "core.sparseCheckout", "true", why="git cannot be set up")
        _git(*at, "remote", "add", "origin", url, why="git cannot be set up")
        fetch = ("fetch", "--quiet", "--no-tags", "--depth=1", "--filter=blob:none", "origin", commit)
        _git(*at, *fetch, why=f"The commit {commit} of {shown} cannot be fetched")
        _git(*at, "checkout", "--quiet", "--detach", commit, why=f"The files of {shown} cannot be fetched")
        yield work
    finally:
        remove_tree(work)


def _take(work: Path, path: str, root: Path, shown: str) -> None:
    """Move a folder to its place in the cache. Raises ConfigError where it is none, or leads out of itself."""
    source, place = work / path, root / path
    if source.resolve() != work.resolve() / path or not source.is_dir():
        raise ConfigError(f"{shown} has no folder {path}.")
    for file in source.rglob("*"):
        if file.is_symlink() and not (file.exists() and Path(os.path.realpath(file)).is_relative_to(source.resolve())):
            raise ConfigError(f"{shown}: {file.relative_to(work)} is a link out of the task's folder: not taken.")
        if _is_pointer(file):
            raise ConfigError(
                f"{shown}: {file.relative_to(work)} is kept by git-lfs. Install it and set it up (git lfs install)."
            )
    make_folder(place.parent)
    try:
        source.rename(place)
    except OSError:
        if not place.is_dir():  # another process was first
            raise


def _is_pointer(file: Path) -> bool:
    """Whether a file stands for one that git-lfs has not fetched."""
    if file.is_symlink() or not file.is_file() or file.stat().st_size > 1024:
        return False
    return file.read_bytes().startswith(b"version https://git-lfs")


def _git(*arguments: str, why: str) -> str:
    """What a command of git says. Raises ConfigError where it fails, with its last words."""
    settings = [word for setting in _SETTINGS for word in ("-c", setting)]
    try:
        process = subprocess.Popen(
            ["git", *settings, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(os.environ),
            start_new_session=True,  # without a terminal, in which ssh would ask for a password
        )
    except FileNotFoundError:
        raise ConfigError(
            "Tasks of a registry are fetched by git, and it is not installed: apt-get install git."
        ) from None
    try:
        printed, complaints = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{why}: git took more than {_SECONDS / 60:g} minutes.") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != 0:
        words = " ".join(complaints.decode(errors="replace").split())[-500:]
        raise ConfigError(f"{why}: {words or f'git ended with exit code {process.returncode}'}")
    return printed.decode(errors="replace")


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    return {**{name: value for name, value in ours.items() if _KEPT.match(name)}, **_OWN}
