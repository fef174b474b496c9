"""How a run stands, in the words that every table and page uses: running, succeeded, stopped by you, stopped (why),
failed (why), died. Read from its row in a store, or from its folder, where `run.json` says how it ended.
"""

from __future__ import annotations

import json
import logging
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from agentlightning.files import atomic_write
from agentlightning.metrics.sink import RUN_FILE
from agentlightning.reading import read_object
from agentlightning.types import Run, RunStatus

logger = logging.getLogger(__name__)

LIVE_FILE = "live.json"
"""Names the file with the address, key and process of a run that goes on."""
ANSWER_SECONDS = 0.5


class Standing(NamedTuple):
    """One word for a column, and the reason where there is one."""

    word: str
    """`running`, `succeeded`, `stopped by you`, `stopped`, `failed`, `died`, or `ended` where that is all we know."""
    why: str | None = None

    def __str__(self) -> str:
        return f"{self.word}: {self.why}" if self.why else self.word


def standing(status: str | None, error: str | None, *, alive: bool) -> Standing:
    """How a run stands whose row or file says `status` and `error`; `alive`: whether its process may still be there.

    A run that was killed could not write how it ended: its status says that it is running. A run of a version that
    did not write its status (None) has ended somehow.
    """
    if status == RunStatus.RUNNING or (status is None and alive):
        return Standing("running") if alive else Standing("died", "its process was killed or the machine stopped")
    if status == RunStatus.STOPPED:
        return Standing("stopped", error) if error else Standing("stopped by you")
    if status == RunStatus.FAILED:
        return Standing("failed", error)
    return Standing("ended" if status is None else "succeeded")


def standing_of(run: Run, *, alive: bool) -> Standing:
    """The state of a run by its row in a store."""
    return standing(run.status, run.error, alive=alive)


def standing_in(folder: Path) -> Standing:
    """The state of the run in this folder, read from its files."""
    known = _known(folder)
    return standing(known.get("status"), known.get("error"), alive=is_alive(folder))


def write_end(folder: Path, status: RunStatus, error: str | None) -> None:
    """Write to `run.json` how the run ended, so that its folder says so without its store."""
    known = _known(folder)
    if not known:
        return
    try:
        atomic_write(folder / RUN_FILE, json.dumps({**known, "status": status.value, "error": error}, indent=2))
    except OSError as problem:
        logger.warning("%s does not say how the run ended: %s", folder / RUN_FILE, problem)


def is_alive(folder: Path) -> bool:
    """Whether the run's address answers. A killed run leaves its `live.json` behind."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        url = urlsplit(read_object(folder / LIVE_FILE)["url"])
        with socket.create_connection((url.hostname or "", url.port or 80), timeout=ANSWER_SECONDS):
            return True
    return False


def _known(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, TypeError):
        return read_object(folder / RUN_FILE)
    return {}
