"""Folders that many tests of a process share, and that go with it."""

from __future__ import annotations

import shutil
import tempfile

FOLDERS: list[str] = []


def shared_folder(prefix: str) -> str:
    """A new folder, kept until the process has run its tests: `atexit` is not called in the workers of pytest-xdist."""
    FOLDERS.append(tempfile.mkdtemp(prefix=prefix))
    return FOLDERS[-1]


def remove_shared_folders() -> None:
    while FOLDERS:
        shutil.rmtree(FOLDERS.pop(), ignore_errors=True)
