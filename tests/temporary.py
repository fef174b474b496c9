"""What many tests of a process share, and what goes with it: `atexit` is not called in the workers of pytest-xdist."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack

SHARED = ExitStack()
"""Closed when the process has run its tests."""


def shared_folder(prefix: str) -> str:
    """A new folder, kept until then."""
    folder = tempfile.mkdtemp(prefix=prefix)
    SHARED.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder
