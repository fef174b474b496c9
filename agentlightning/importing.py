"""Where processes of this package look for modules: where the one that started them does, behind their own places."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import agentlightning

IMPORT_PATH = "AGL_IMPORT_PATH"
"""The environment variable with the places where the main process looks for modules."""


def import_environment() -> dict[str, str]:
    """The environment in which a fresh Python finds this package, and can look for all else where this one would."""
    root = str(Path(agentlightning.__file__).parents[1])
    own = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    packages = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": packages, IMPORT_PATH: own}


def look_where_the_parent_does() -> None:
    """Behind this process's own places, so that a file of the user's never takes the place of a library."""
    sys.path += [path for path in os.environ.get(IMPORT_PATH, "").split(os.pathsep) if path and path not in sys.path]
