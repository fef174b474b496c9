"""Clients of the small server: they share a training, come and go, die, stop it, and fetch what was trained."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from agent_lightning import Client
from agent_lightning.exceptions import ServerConnectionError
from agentlightning.trainer.sync import run_sync
from tests.small_client.server import small_server

pytestmark = pytest.mark.timeout(280)

TRAIN = 'client.upload_data("train.jsonl")\nprint(client.train(agent), "ran", ran)\n'
WAITS = """
first = agent
def agent(resource, task):
    while not os.path.exists("the other one runs"):
        time.sleep(0.05)
    return first(resource, task)
"""
SOON = """
import agent_lightning.client
agent_lightning.client.STATUS_SECONDS = 0.2  # so that a short training has time to say how it goes
"""
COMES = """
second = agent
def agent(resource, task):
    open("the other one runs", "w").close()
    return second(resource, task)
"""
AFTERWARDS = """
client.checkpoint("fetched")
print(client.evaluate("train.jsonl"))
"""


def first_rollout(client: subprocess.Popen[str]) -> None:
    assert client.stdout is not None
    said = []
    while (line := client.stdout.readline()) != "rollout\n":
        said.append(line)
        if not line:  # it ended without any
            raise AssertionError((said, client.communicate()[1]))


@pytest.mark.slow
def test_a_client_trains_a_step(tmp_path: Path) -> None:
    with small_server(tmp_path, 1) as server:
        client = server.client(TRAIN)
        said, warned = client.communicate(timeout=240)
    assert client.returncode == 0, warned
    assert said.count("rollout") == 8, said  # threads may print between a word and its end of line
    assert "TrainingResult(steps=1" in said


@pytest.mark.slow
def test_two_clients_share_a_training_and_take_the_model_with_them(tmp_path: Path) -> None:
    with small_server(tmp_path, 3) as server:
        first = server.client(WAITS + TRAIN + AFTERWARDS)
        second = server.client(COMES + SOON + TRAIN)
        outputs = [client.communicate(timeout=240) for client in (first, second)]
    for (said, warned), client in zip(outputs, (first, second), strict=True):
        assert client.returncode == 0, warned
        assert "TrainingResult(steps=3" in said
        assert "cannot be reached" not in warned
    assert outputs[1][0].count("rollout") > 0
    assert "Step 1 of 3: reward" in "".join(outputs[1])
    assert "Evaluation(reward=" in outputs[0][0]
    assert "rollouts=8, failed=0" in outputs[0][0]
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "fetched")


@pytest.mark.slow
def test_a_client_that_dies_leaves_its_work_to_the_next_one(tmp_path: Path) -> None:
    with small_server(tmp_path, 1000, "--client-timeout", "20") as server:
        dies = server.client(TRAIN)
        first_rollout(dies)
        dies.kill()
        dies.communicate()
        takes_over = server.client(TRAIN)
        first_rollout(takes_over)
        takes_over.kill()
        takes_over.communicate()
        client = Client(server.url)
        while (status := run_sync(client._post("/status", {"wait": 1.0})))["state"] == "running":
            time.sleep(0.2)
        assert status["state"] == "stopped"
        assert "No client was heard of" in status["error"]
        (tmp_path / "train.jsonl").write_text('{"question": "What is 1 + 1?"}\n')
        other = server.client(TRAIN)
        first_rollout(other)
        other.kill()
        other.communicate()


@pytest.mark.slow
def test_stop_ends_a_training_of_others(tmp_path: Path) -> None:
    with small_server(tmp_path, 1000) as server:
        trains = server.client(TRAIN)
        first_rollout(trains)
        Client(server.url).stop()
        _, said = trains.communicate(timeout=200)
        assert "stopped before its end" in said
        assert "Client.stop()" in said
        assert "cannot be reached" not in said


@pytest.mark.slow
def test_a_server_that_is_told_to_end_does(tmp_path: Path) -> None:
    with small_server(tmp_path, 1000) as server:
        trains = server.client(TRAIN)
        first_rollout(trains)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(90) == 0
        trains.communicate(timeout=100)
        assert trains.returncode != 0


@pytest.mark.slow
def test_what_cannot_be_is_said_at_once(tmp_path: Path) -> None:
    with small_server(tmp_path, 1) as server:
        client = Client(server.url)
        with pytest.raises(ServerConnectionError, match="upload_data"):
            client.train(lambda resource, task: 1.0)
        with pytest.raises(ServerConnectionError, match="has left a checkpoint"):
            client.checkpoint(tmp_path / "nothing")
