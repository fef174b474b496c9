"""A run's log file: all that this package has to say, also what would be too much for a terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agentlightning.console import SafeFormatter, TerminalLog
from agentlightning.files import open_private, refuse_link

LOG_FILE = "log.txt"
_PACKAGE = "agentlightning"


class _PrivateFile(logging.FileHandler):
    def _open(self) -> Any:
        return open_private(self.baseFilename, self.mode, encoding=self.encoding)

    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk is reported on the terminal; Python would add a traceback to each line that cannot be written."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Append what is logged from INFO on, with keys shortened; other handlers get what they got before. Where there are
    none, as in most scripts, warnings stay on the terminal."""
    refuse_link(path)  # the file is opened by whoever logs first
    package, root = logging.getLogger(_PACKAGE), logging.getLogger()
    level, before = package.level, package.getEffectiveLevel()
    file = _PrivateFile(path, encoding="utf-8", delay=True)
    file.setLevel(logging.INFO)
    file.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def as_before(record: logging.LogRecord) -> bool:
        return record.levelno >= before or not record.name.startswith(_PACKAGE)

    alone = None if package.hasHandlers() else TerminalLog(kept=True)  # in place of Python's last resort
    if alone is not None:
        alone.setLevel(logging.WARNING)
        package.addHandler(alone)
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
        with suppress(OSError):  # what a full disk did not take
            file.close()
        for handler in others:
            handler.removeFilter(as_before)
        if alone is not None:
            package.removeHandler(alone)
