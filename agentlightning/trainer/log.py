"""A run's log file: all that this package has to say, also what would be too much for a terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentlightning.console import SafeFormatter
from agentlightning.files import open_private, refuse_link

LOG_FILE = "log.txt"
_PACKAGE = "agentlightning"


class _PrivateFile(logging.FileHandler):
    def _open(self) -> Any:
        return open_private(self.baseFilename, self.mode, encoding=self.encoding)


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Append what is logged from INFO on, with keys shortened; other handlers get what they got before."""
    refuse_link(path)  # the file is opened by whoever logs first
    package, root = logging.getLogger(_PACKAGE), logging.getLogger()
    level, before = package.level, package.getEffectiveLevel()
    file = _PrivateFile(path, encoding="utf-8", delay=True)
    file.setLevel(logging.INFO)
    file.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def as_before(record: logging.LogRecord) -> bool:
        return record.levelno >= before or not record.name.startswith(_PACKAGE)

    others = (*root.handlers, *package.handlers)
    for handler in others:
        handler.addFilter(as_before)
    package.addHandler(file)
    package.setLevel(min(before, logging.INFO))
    try:
        yield
    finally:
        package.setLevel(level)
        package.removeHandler(file)
        file.close()
        for handler in others:
            handler.removeFilter(as_before)
