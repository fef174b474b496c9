"""The journal: answers that were paid for, a line each, so that a run that was killed does not pay for them again.

A line counts when it is whole; it is on disk before anything acts on it. Rollouts are not in it: the store has them,
under ids that follow from what they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentlightning.files import make_folder, open_private
from agentlightning.keys import redacted


class Journal:
    """Values by key, in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        text = path.read_bytes() if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]  # a last line that a dying process left unfinished does not count
        self._known: dict[str, Any] = {}
        for line in whole.splitlines():
            entry = json.loads(line)
            self._known[entry.pop("key")] = entry
        self._file = open_private(path, "ab")
        self._file.truncate(len(whole))

    def get(self, key: str) -> Mapping[str, Any] | None:
        return self._known.get(key)

    def put(self, key: str, entry: Mapping[str, Any]) -> None:
        """Write an entry, with keys of attempts shortened; returns when the disk has it."""
        line = redacted(json.dumps({"key": key, **entry}))
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._known[key] = {name: value for name, value in json.loads(line).items() if name != "key"}

    def close(self) -> None:
        self._file.close()
