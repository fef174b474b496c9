"""One notice per process, at its end, with the newer form of every old name that was used. Never a warning per call.

It is logged by `agentlightning.compat.notice`; whoever does not want it turns that logger off.
"""

from __future__ import annotations

import atexit
import logging
import os

from agentlightning.compat.row import Old

logger = logging.getLogger(__name__)

_used: dict[str, Old] = {}
_process = os.getpid()


def use(old: Old) -> None:
    """An old name was used. What has no newer form, and nothing to say, needs no notice."""
    if old.name in _used or not (old.newer or old.note):
        return
    if not _used:
        atexit.register(_say)
    _used[old.name] = old


def text() -> str:
    """The notice; empty if there is nothing to say."""
    lines = [f"  {old.name.replace(':', '.')}  →  {_instead(old)}" for old in _used.values()]
    if not lines:
        return ""
    return "\n".join(["This script uses names of agentlightning 0.2/0.3. They keep working; today one writes:", *lines])


def _instead(old: Old) -> str:
    return "; ".join(filter(None, [old.newer, old.note]))


def _say() -> None:
    if os.getpid() == _process and _used:  # not again in processes that were forked from this one
        logger.warning("%s", text())
