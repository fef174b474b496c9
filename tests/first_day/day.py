"""A new user's terminal: commands and scripts as they are typed, and what must be in the answer."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.typed import agl, typed

__all__ = ["agl", "answers", "said", "script", "typed"]

HEADER = "import agentlightning as agl\n"


def script(folder: Path, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python train.py` with this text in it."""
    (folder / "train.py").write_text(HEADER + text)
    return typed(folder, "train.py", environment=environment)


def answers(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """It failed in words: status 1, no traceback, and these words are in what it said."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    said(done, *words)


def said(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """The words are in what it printed, wherever lines end."""
    printed = " ".join((done.stdout + done.stderr).split())
    for word in words:
        assert word in printed, f"{word!r} is not in:\n{done.stdout}\n{done.stderr}"
