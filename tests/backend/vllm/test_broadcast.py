"""Weights that are sent to servers by broadcast: they arrive whole, or not at all; no member waits for a dead one."""
# ruff: noqa: ASYNC110 - a wait of a test

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from agentlightning.backend import POLICY, ModelSpec
from agentlightning.backend.embedded.backend import ServerThread
from agentlightning.backend.vllm.backend import VLLMBackend
from agentlightning.backend.vllm.options import parse_options
from agentlightning.backend.vllm.worker.agl_vllm_worker import transfer
from agentlightning.backend.vllm.worker.agl_vllm_worker.transfer import Terms, TransferGroup, files_of, receive, send
from agentlightning.errors import ConfigError, EngineError
from agentlightning.learner.base import LossConfig, OptimParams

from ...engine.test_model_process import row
from .fake import FakeVLLM, served
from .on_fake import FlipsABit, TorchModel
from .test_publication import PROMPT, sample

# ---- the group -------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """More than a bucket, exactly one, and nothing."""
    monkeypatch.setattr(transfer, "BUCKET", 1 << 16)
    made = tmp_path / "sent"
    made.mkdir()
    for name, size in {"large": 2 * transfer.BUCKET + 17, "even": transfer.BUCKET, "empty": 0, "small": 1}.items():
        (made / name).write_bytes(os.urandom(size))
    return made


def agreed(listener: socket.socket, size: int, folder: Path, seconds: float = 60.0) -> Terms:
    return Terms("127.0.0.1", listener.getsockname()[1], size, "gloo", seconds, files_of(folder))


def test_all_members_get_every_byte(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(4) as threads:
        terms = agreed(listener, 4, folder)
        assert Terms.parse(terms.dump()) == terms
        members = [threads.submit(receive, terms, rank, tmp_path / str(rank)) for rank in (1, 2, 3)]
        send(terms, listener, folder)
        for member in members:
            member.result(60)
    for rank in (1, 2, 3):
        for name, _ in terms.files:
            assert (tmp_path / str(rank) / name).read_bytes() == (folder / name).read_bytes()
        assert files_of(tmp_path / str(rank)) == terms.files


def test_a_member_that_does_not_come_is_not_waited_for_without_end(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as threads:
        terms = agreed(listener, 3, folder, seconds=1.0)
        waiting = threads.submit(receive, terms, 1, tmp_path / "1")
        with pytest.raises(RuntimeError, match="wait timeout"):
            send(terms, listener, folder)
        with pytest.raises(RuntimeError):
            waiting.result(60)


@pytest.mark.slow
def test_a_sender_that_is_killed_ends_the_wait_of_all(folder: Path, tmp_path: Path) -> None:
    """Long before a wait ends by itself."""
    program = subprocess.Popen(
        [sys.executable, "-I", transfer.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdin is not None
    assert program.stdout is not None
    known = {"host": "127.0.0.1", "size": 3, "backend": "gloo", "seconds": 300.0, "files": files_of(folder)}
    program.stdin.write(json.dumps({"folder": str(folder), "terms": known}) + "\n")
    program.stdin.flush()
    terms = Terms.parse(json.dumps({**known, "port": json.loads(program.stdout.readline())["port"]}))
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(receive, terms, 1, tmp_path / "1")
        time.sleep(0.5)
        program.kill()
        with pytest.raises(RuntimeError):
            waiting.result(60)
    program.communicate()


# ---- the backend -----------------------------------------------------------------------------------------------------


class Breaks(FakeVLLM):
    """Leaves the group in the middle of the next broadcast."""

    soon = False

    def agl_receive(self, name: str, terms: str, rank: int, root: str) -> str:
        if not self.soon:
            return super().agl_receive(name, terms, rank, root)
        self.soon = False
        TransferGroup(Terms.parse(terms), rank).close()
        raise RuntimeError("it broke")


class TwoOnFake(VLLMBackend):
    """Two servers on other machines, as it were."""

    spawn = staticmethod(ServerThread.spawn)

    def __init__(self, spec: ModelSpec) -> None:
        self._running = ExitStack()
        self.fakes = [Breaks(TorchModel(spec.model), TorchModel) for _ in range(2)]
        urls = [self._running.enter_context(served(fake)) for fake in self.fakes]
        options = {"urls": urls, "start_seconds": 60.0, "weight_transfer": "gloo"}
        super().__init__(replace(spec, backend_options=options))

    async def close(self) -> None:
        await super().close()
        self._running.close()
        for path in in_memory(self):
            shutil.rmtree(path.parent, ignore_errors=True)


@asynccontextmanager
async def started(tiny_model_dir: Path, folder: Path, lora_rank: int | None = None) -> AsyncIterator[TwoOnFake]:
    spec = ModelSpec(
        model=str(tiny_model_dir), device="cpu", max_context=64, seed=0, lora_rank=lora_rank, folder=str(folder)
    )
    backend = TwoOnFake(spec)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


async def learn(backend: TwoOnFake) -> int:
    learner = backend.learner(POLICY)
    await learner.forward_backward([row(PROMPT, await sample(backend))], LossConfig(name="reinforce"))  # pyright: ignore
    await learner.optim_step(OptimParams(learning_rate=3e-3))
    return await backend.publish(POLICY)


def same(backend: TwoOnFake) -> bool:
    """Whether both servers compute the same."""
    first, second = (current(fake).next_logits(PROMPT.tolist(), {}) for fake in backend.fakes)
    return bool(np.array_equal(first, second))


def current(fake: FakeVLLM) -> Any:
    return list(fake.adapters.values())[-1] if fake.adapters else fake.base


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [None, 4])
async def test_all_servers_take_what_was_learned(tiny_model_dir: Path, tmp_path: Path, lora_rank: int | None) -> None:
    async with started(tiny_model_dir, tmp_path, lora_rank) as backend:
        before = current(backend.fakes[0]).next_logits(PROMPT.tolist(), {})
        for version in (1, 2, 3):
            assert await learn(backend) == version
            assert same(backend)
        assert not np.array_equal(before, current(backend.fakes[0]).next_logits(PROMPT.tolist(), {}))
        left = sorted(path.name for path in in_memory(backend))
        if lora_rank is None:
            assert left == [], "a server that loaded weights keeps no copy"
        else:
            assert [name[-2:] for name in left] == ["v2", "v2", "v3", "v3"], "adapters stay as long as they are used"


def in_memory(backend: TwoOnFake) -> list[Path]:
    """What servers hold that they received."""
    found = [Path(path) for fake in backend.fakes for path in (fake._worker._agl_received or {}).values()]  # pyright: ignore
    return [path for path in found if path.is_dir()]


@pytest.mark.slow
async def test_a_server_that_breaks_off_costs_another_try(
    tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(tiny_model_dir, tmp_path) as backend:
        await learn(backend)
        backend.fakes[1].soon = True
        assert await learn(backend) == 2
        assert not backend.fakes[1].soon
        assert "Not all servers got what was published at once" in caplog.text
        assert "did not end within" not in caplog.text, "the others saw that it was gone"
        assert same(backend)
        assert (await sample(backend)).version == 2  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
async def test_a_sender_that_was_killed_is_started_again(
    tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(tiny_model_dir, tmp_path) as backend:
        await learn(backend)
        sender = next(child for child in psutil.Process().children() if transfer.__file__ in child.cmdline())
        sender.kill()
        while sender.is_running():
            await asyncio.sleep(0.01)
        assert await learn(backend) == 2
        assert same(backend)
        assert not caplog.records, "all servers got it at once"


@pytest.mark.slow
async def test_a_flipped_bit_on_the_way_is_found(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with started(tiny_model_dir, tmp_path) as backend:
        await learn(backend)
        for fake in backend.fakes:
            fake.__class__ = FlipsABit  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(EngineError, match=r"damaged on their way to the vLLM server at http.*: \S*norm.weight"):
            await learn(backend)
        assert {fake.version for fake in backend.fakes} == {"1"}, "they were told of no other weights"


async def test_nccl_needs_a_gpu(tiny_model_dir: Path) -> None:
    class InThread(VLLMBackend):
        spawn = staticmethod(ServerThread.spawn)

    options = {"weight_transfer": "nccl", "urls": ["http://localhost:1"]}
    backend = InThread(ModelSpec(model=str(tiny_model_dir), device="cpu", max_context=64, backend_options=options))
    with pytest.raises(ConfigError, match="take 'gloo' or 'files'"):
        await backend.start()
    await backend.close()


def test_other_ways_are_refused() -> None:
    with pytest.raises(ConfigError, match="weight_transfer"):
        parse_options({"weight_transfer": "pigeon"})
