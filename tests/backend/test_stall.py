"""A model process that stands still is noticed by its progress, said, and ended; one that works is left in peace."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentlightning.backend.embedded.client import ModelProcess
from agentlightning.backend.embedded.connection import StallWatch
from agentlightning.backend.embedded.protocol import ProcessSettings
from agentlightning.engine.base import SamplingParams
from agentlightning.errors import BackendDied

PROMPT = np.array([5, 6], dtype=np.int32)


@pytest.mark.slow
async def test_a_suspended_process_is_noticed_and_ended(
    tiny_model_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both who samples and who learns are told, and it is said on the way."""
    monkeypatch.setattr("agentlightning.backend.embedded.connection.WARN_SECONDS", 3.0)
    settings = ProcessSettings(model=str(tiny_model_dir), learning_threads=1, device="cpu")
    async with ModelProcess(settings, stall_seconds=6.0) as process:
        assert len((await anext(process.generate(PROMPT, SamplingParams(max_tokens=2)))).ids)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        sampling: asyncio.Future[Any] = asyncio.ensure_future(anext(process.generate(PROMPT, SamplingParams())))
        learning: asyncio.Future[Any] = asyncio.ensure_future(process.info())
        both: list[asyncio.Future[Any]] = [sampling, learning]
        for waiting in both:
            with pytest.raises(BackendDied, match="made no progress for 6 s"):
                await asyncio.wait_for(waiting, 60)
        assert "makes no progress for 3 s" in caplog.text


def test_a_watcher_that_stood_still_blames_nobody() -> None:
    watch = StallWatch(limit=100.0)
    watch.pulse(0, 1.0)
    assert watch.look(busy=True, seconds=3600.0) == "fine"
    assert watch.quiet == 1.0
    looks = [watch.look(busy=True) for _ in range(99)]
    assert looks.count("slow") == 1
    assert looks[-1] == "stalled"


def test_what_counts_as_progress() -> None:
    watch = StallWatch(limit=100.0)
    for _ in range(200):
        assert watch.look(busy=True) == "fine", "it has not said anything yet"
    watch.pulse(0, 5.0)
    for _ in range(50):
        watch.pulse(0, 5.001)
        watch.look(busy=True)
    assert watch.quiet == 50, "a pulse alone is none"
    for advance in (lambda: watch.pulse(1, 5.001), lambda: watch.pulse(1, 7.0), watch.moved):
        watch.look(busy=True)
        advance()
        assert watch.quiet == 0
    watch.look(busy=True)
    watch.pulse(1, 7.0, idle=True)
    assert watch.quiet == 0, "nothing to do is no standstill"
    watch.look(busy=True)
    watch.look(busy=False)
    assert watch.quiet == 0
