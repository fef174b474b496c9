"""Agents that change the working directory: it is the whole process's, so it is put back when they have ended."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

logger = logging.getLogger(__name__)


class _Folder:
    """The working directory of a process in which agents run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._home: str | None = None
        self._reported = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While an agent runs; the directory is the one in which the first of those that run began."""
        with self._lock:
            if not self._running:
                with suppress(FileNotFoundError):
                    self._home = os.getcwd()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._return()

    def _return(self) -> None:
        if self._home is None:
            return
        with suppress(FileNotFoundError):
            if os.getcwd() == self._home:
                return
        with suppress(OSError):
            os.chdir(self._home)
        if not self._reported:
            self._reported = True
            logger.warning(
                "The agent changed the working directory of the whole process (os.chdir), in which other rollouts run "
                "and the run writes its files. It was put back to %s. Use whole paths, or cwd= of subprocess.",
                self._home,
            )


same_folder = _Folder().kept
