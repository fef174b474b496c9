"""The server is killed with signal 9 while a client trains and saves: what it acknowledged is there and whole, and
training goes on from it to the weights of a run that nothing happened to."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from .conftest import datum, ids, rest, tinker, types
from .test_learning import weights_in

STEPS = 24
KILLS = int(os.environ.get("AGL_JOB_KILLS", 4))


class Process:
    """`agl serve --training` as it is typed, on one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ["calc", "--training", "served", "--port", str(self._port), "--no-key"]
        with (self._folder / "log").open("ab") as log:
            command = [sys.executable, "-m", "agentlightning", "serve", *options]
            self._process = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"{self.url}/api/v1/healthz").raise_for_status()
                return
            except httpx.TransportError:
                assert time.monotonic() < deadline, (self._folder / "log").read_text()
                time.sleep(0.1)

    def end(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(60)


def trained(url: str, path: str | None, first: int, acknowledged: list[str]) -> None:
    """Learn from one step on, saving after each, until the end or until the server is gone."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-any")
    try:
        if path is None:
            client = service.create_lora_training_client(base_model="calc", rank=4, seed=3).result()
        else:
            client = service.create_training_client_from_state_with_optimizer(path).result()
        for step in range(first, STEPS):
            client.forward_backward([datum(ids(step, 12))], "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            acknowledged.append(client.save_state(f"step-{step}").result().path)
    except Exception:  # the server was killed
        return


def learn(url: str, acknowledged: list[str], timeout: float | None = None) -> threading.Thread:
    """In a thread: a client whose server is gone tries again for minutes."""
    path = acknowledged[-1] if acknowledged else None
    first = 0 if path is None else int(path.rpartition("-")[2]) + 1
    thread = threading.Thread(target=trained, args=(url, path, first, acknowledged), daemon=True)
    thread.start()
    thread.join(timeout)
    return thread


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_was_acknowledged_is_there(tmp_path: Path) -> None:
    rng, disturbed, calm = random.Random(1), list[str](), list[str]()
    for _ in range(KILLS):
        server = Process(tmp_path)  # another port each time: the clients of before find nobody
        server.start()
        known = list(disturbed)
        learn(server.url, known, timeout=rng.uniform(4.0, 9.0))
        disturbed = list(known)
        server.end(signal.SIGKILL)
    server = Process(tmp_path)
    server.start()
    try:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-any")
        api = rest(service)
        listed: list[Any] = api.list_user_checkpoints(limit=1000).result().checkpoints
        service.close("success").result()
        assert {*disturbed} <= {one.tinker_path for one in listed}
        learn(server.url, disturbed)
        learn(server.url, calm)
        assert disturbed[-1].endswith(f"step-{STEPS - 1}")
        assert calm[-1].endswith(f"step-{STEPS - 1}")
        folder = tmp_path / "served" / "tinker"
        found = [
            weights_in(folder / run.replace(":", "-") / "weights" / f"step-{STEPS - 1}" / "model")
            for run in (path.removeprefix("tinker://").partition("/")[0] for path in (disturbed[-1], calm[-1]))
        ]
        for key, value in found[1].items():
            torch.testing.assert_close(found[0][key], value, rtol=0, atol=1e-6)
    finally:
        server.end(signal.SIGTERM)
