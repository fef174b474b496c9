"""The server is killed with signal 9 during a job, again and again: it goes on, and comes to the same weights.

AGL_JOB_KILLS=20 kills it twenty times in each job.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from .conftest import chats, events, pairs, polled, until, upload

GRADER = {
    "type": "string_check",
    "name": "nine",
    "operation": "like",
    "input": "{{ sample.output_text }}",
    "reference": "9",
}
ROWS: dict[str, Any] = {
    "supervised": chats(32),
    "dpo": pairs(32),
    "reinforcement": [{"messages": chat["messages"][:1]} for chat in chats(16)],
}
OWN: dict[str, Any] = {
    "supervised": {"hyperparameters": {"n_epochs": 4, "batch_size": 4}},
    "dpo": {"hyperparameters": {"n_epochs": 4, "batch_size": 4}},
    "reinforcement": {
        "grader": GRADER,
        "hyperparameters": {"n_epochs": 4, "batch_size": 4, "compute_multiplier": 0.5, "eval_interval": 8},
    },
}
STEPS = {"supervised": 32, "dpo": 32, "reinforcement": 16}
GIVEN = int(os.environ.get("AGL_JOB_KILLS", 0))
KILLS = {"supervised": GIVEN or 4, "dpo": GIVEN or 4, "reinforcement": GIVEN or 2}


class Killed:
    """`agl serve --training` as it is typed, on one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "models.json").write_text(
            json.dumps({"calc": {"model": "calc", "deterministic": True, "max_context": 64}})
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{self._port}/v1", api_key="any", max_retries=0)
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        options = ["--training", "served", "--base-models", "models.json", "--port", str(self._port), "--no-key"]
        command = [sys.executable, "-m", "agentlightning", "serve", *options]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 (it is killed and waited for without a loop)
                command, cwd=self._folder, stdout=log, stderr=log
            )
        await polled(self._answers, bool, 60)

    async def _answers(self) -> bool:
        try:
            return bool((await self.client.models.list()).data)
        except openai.APIConnectionError:
            assert self._process is not None
            assert self._process.poll() is None, (self._folder / "log").read_text()
            return False

    def end(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(60)

    def weights(self, job: str, step: int) -> bytes:
        checkpoint = self._folder / "served/runs" / job / f"checkpoints/step-{step:06d}"
        return (checkpoint / "model/model.safetensors").read_bytes()


async def steps_of(client: openai.AsyncOpenAI, job: str) -> int:
    page = await client.fine_tuning.jobs.list_events(job, limit=100)
    return sum(event.type == "metrics" for event in page.data)


@pytest.mark.slow
@pytest.mark.timeout(1200 if GIVEN else 600)
@pytest.mark.parametrize("kind", STEPS)
async def test_a_job_survives_its_server(tmp_path: Path, kind: str) -> None:
    server, rng, steps = Killed(tmp_path), random.Random(0), STEPS[kind]
    client = server.client
    await server.start()
    try:
        train, val = await upload(client, ROWS[kind]), await upload(client, ROWS[kind][:2])
        asked: Any = {"training_file": train, "validation_file": val, "method": {"type": kind, kind: OWN[kind]}}
        made = [await client.fine_tuning.jobs.create(model="calc", seed=3, **asked) for _ in range(2)]
        disturbed, calm = (job.id for job in made)
        for number in range(KILLS[kind]):
            await until(client, disturbed, "running", "succeeded", seconds=60)
            least = number * steps // (KILLS[kind] + 1)
            await polled(lambda: steps_of(client, disturbed), lambda n, least=least: n > least, 120)
            await asyncio.sleep(rng.random())
            server.end(signal.SIGKILL)
            await server.start()
        for job in (disturbed, calm):
            assert (await until(client, job, seconds=240)).status == "succeeded"
            said = await events(client, job)
            first = 0 if kind == "reinforcement" else 1  # which is validated before
            assert [e.data["step"] for e in said if e.type == "metrics"] == list(range(first, steps + 1))
            assert [e.message for e in said].count("The job has successfully completed") == 1
            kept = [c.step_number async for c in client.fine_tuning.jobs.checkpoints.list(job)]
            assert len(set(kept)) == len(kept) >= 3  # a server's end may have made one between two others
            assert kept[0] == steps
        assert server.weights(disturbed, steps) == server.weights(calm, steps)
    finally:
        server.end(signal.SIGTERM)
        await client.close()
