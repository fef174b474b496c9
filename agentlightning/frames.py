"""Which lines of a traceback are the user's own: neither this package's, nor a library's, nor Python's."""

from __future__ import annotations

import os
import sysconfig

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def is_library(filename: str) -> bool:
    """Whether a frame's file belongs to an installed package, to Python, or is no file at all.

    Compiled modules name the sources they were made from (uvloop/loop.pyx), which are nowhere here.
    """
    return (
        filename.startswith(("<", _PYTHON)) or filename.endswith(".pyx") or any(name in filename for name in _LIBRARIES)
    )


def is_ours(filename: str) -> bool:
    """Whether it is this package's."""
    return filename.startswith(_PACKAGE)


def is_own(filename: str) -> bool:
    """Whether it is the user's."""
    return not is_ours(filename) and not is_library(filename)
