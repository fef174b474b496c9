"""Which processes share a machine's files: those that find the same word in the same folder.

An address does not say it: containers with a network in common have folders of their own.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_NAME = ".machine"


def machine_of(folders: Iterable[Path]) -> str:
    """A word that all processes find which see the very same folders, made by the first of them."""
    return "-".join(_word_in(folder) for folder in folders)


def _word_in(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    fresh, kept = folder / f"{_NAME}-{secrets.token_hex(8)}", folder / _NAME
    fresh.write_text(secrets.token_hex(8))
    with suppress(FileExistsError):  # a link appears whole, and never in place of another one
        os.link(fresh, kept)
    fresh.unlink()
    return kept.read_text()
