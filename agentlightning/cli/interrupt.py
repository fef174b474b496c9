"""Waiting for Ctrl-C."""

from __future__ import annotations

import asyncio
import signal


async def interrupted() -> None:
    """Returns at the first SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
