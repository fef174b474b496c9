"""Ctrl-C: waiting for it, and the exit status that says so."""

from __future__ import annotations

import asyncio
import signal
from typing import NoReturn

import typer

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ended, as shells count it: 128 + SIGINT."""

_ctrl_c = False


async def interrupted() -> None:
    """Returns at the first SIGINT or SIGTERM."""
    stop = asyncio.Event()

    def by_ctrl_c() -> None:
        global _ctrl_c
        _ctrl_c = True
        stop.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, by_ctrl_c)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()


def exit_interrupted() -> NoReturn:
    """End a command that stopped cleanly at Ctrl-C."""
    raise typer.Exit(INTERRUPTED)


def was_interrupted() -> bool:
    """Whether a command that waited with `interrupted` was ended by Ctrl-C."""
    return _ctrl_c
