"""A small server of the tests' own: a process with the model that ships and few, short rollouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CONFIG = """
model: {{name: calc}}
training: {{learning_rate: 5.0e-4, batch_size: 2, group_size: 4, steps: {steps}, max_context: 256}}
runtime: {{nworkers: 2, auto_instrumentation: false, air_enabled: false}}
"""
AGENT = """
import json, os, random, sys, time, urllib.request
from agent_lightning import Client
ran = 0
def agent(resource, task):
    global ran
    ran += 1
    body = {"model": "any", "messages": [{"role": "user", "content": task.question}], "max_tokens": 8}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(resource.model_api + "/chat/completions", json.dumps(body).encode(), headers)
    json.load(urllib.request.urlopen(request))
    print("rollout", flush=True)
    return random.random()
client = Client(sys.argv[1])
"""
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Server:
    url: str
    folder: Path
    process: subprocess.Popen[str]

    def client(self, code: str) -> subprocess.Popen[str]:
        """A client in a process of its own, that runs the code."""
        command = [sys.executable, "-u", "-c", AGENT + code, self.url]
        out = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=ENVIRONMENT, text=True, stdout=out, stderr=out)


@contextmanager
def small_server(folder: Path, steps: int, *arguments: str) -> Iterator[Server]:
    (folder / "config.yaml").write_text(CONFIG.format(steps=steps))
    tasks = [{"question": f"What is {n} + 3?"} for n in range(8)]
    (folder / "train.jsonl").write_text("\n".join(json.dumps(task) for task in tasks))
    command = [sys.executable, "-m", "agent_lightning.server", "--port", "0", "--config", "config.yaml", *arguments]
    process = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        yield Server(said.split()[-1], folder, process)
    finally:
        process.kill()
        process.communicate()
