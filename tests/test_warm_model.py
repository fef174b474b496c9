"""The fork that quick tests have as their model process lives and dies as the real one does."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

from agentlightning.backend.embedded.client import ModelProcess
from agentlightning.backend.embedded.protocol import ProcessSettings
from agentlightning.engine.base import SamplingParams
from agentlightning.errors import BackendDied, ModelError


async def test_it_samples_and_ends_when_it_is_killed(tiny_model_dir: Path) -> None:
    async with ModelProcess(ProcessSettings(model=str(tiny_model_dir), device="cpu")) as process:
        assert process.pid is not None
        assert "agl-warm" in " ".join(psutil.Process(process.pid).cmdline())
        prompt = np.array([5, 6], dtype=np.int32)
        assert len((await anext(process.generate(prompt, SamplingParams(max_tokens=2)))).ids)
        waiting = process.watch()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(BackendDied, match="SIGKILL"):  # said once the other end of its output is closed, too
            await waiting


async def test_what_stops_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError):
        await ModelProcess(ProcessSettings(model=str(tmp_path))).start()
