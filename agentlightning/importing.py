"""Where processes of this package look for modules: where the one that started them does, behind their own places.

And which file of a user's is being imported for the agent in it, which is no time to train.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import agentlightning

IMPORT_PATH = "AGL_IMPORT_PATH"
"""The environment variable with the places where the main process looks for modules."""


MAIN_GUARD = 'if __name__ == "__main__":'
_loading: ContextVar[Path | None] = ContextVar("agentlightning_loading", default=None)


@contextmanager
def loading(file: Path) -> Iterator[None]:
    """While a file is imported for the agent in it."""
    token = _loading.set(file)
    try:
        yield
    finally:
        _loading.reset(token)


def file_being_loaded() -> Path | None:
    """The file that is being imported for its agent; None at all other times."""
    return _loading.get()


def import_environment() -> dict[str, str]:
    """The environment in which a fresh Python finds this package, and can look for all else where this one would."""
    root = str(Path(agentlightning.__file__).parents[1])
    own = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    packages = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": packages, IMPORT_PATH: own}


def look_where_the_parent_does() -> None:
    """Behind this process's own places, so that a file of the user's never takes the place of a library."""
    sys.path += [path for path in os.environ.get(IMPORT_PATH, "").split(os.pathsep) if path and path not in sys.path]
