"""How this command was called, so that what it advises can be pasted."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def own_name() -> str:
    """`agl` where a shell finds this one by that name, else the path it was called by."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return "python -m agentlightning"
    found = shutil.which("agl")
    return "agl" if found is not None and Path(found).resolve() == called.resolve() else str(called)
