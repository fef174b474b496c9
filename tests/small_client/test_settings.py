"""The server's configuration: file and environment, with what is wrong named."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_lightning import Resource
from agent_lightning.exceptions import ServerConnectionError
from agent_lightning.runtime import air, current_config, enable_air, set_config
from agent_lightning.settings import Settings, make_algorithm, of_gpus, read_settings
from agentlightning.errors import ConfigError
from agentlightning.types import RolloutConfig

CONFIG = """
model:
  name: calc
training:
  algorithm: grpo
  learning_rate: 5e-4
  batch_size: 4
  group_size: 6
  kl_coef: 0.001
  epochs: 2
runtime:
  nworkers: 4
  air_enabled: true
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_the_file(tmp_path: Path) -> None:
    settings = read_settings(write(tmp_path, CONFIG), {})
    assert settings == Settings(
        name="calc", learning_rate=5e-4, batch_size=4, group_size=6, kl_coef=0.001, epochs=2, nworkers=4
    )
    algorithm = make_algorithm(settings, RolloutConfig())
    assert (algorithm.tasks_per_step, algorithm.group_size, algorithm.kl_coef, algorithm.credit) == (
        4,
        6,
        0.001,
        "return_to_go",
    )


def test_the_environment_wins() -> None:
    settings = read_settings(None, {"LIGHTNING_MODEL_PATH": "/models/x", "LIGHTNING_BATCH_SIZE": "32"})
    assert (settings.name, settings.batch_size) == ("/models/x", 32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainig: {}", "no section 'trainig'"),
        ("training: {lr: 1}", "'lr' is no setting of 'training'"),
        ("runtime: {save_every: 1}", "'save_every' is no setting of 'runtime'"),
        ("training: {batch_size: many}", "'batch_size' is wrong"),
        ("training: [", "cannot be read"),
        ("runtime: {nworkers: 0}", "'nworkers' is 0"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings(write(tmp_path, text), {})


@pytest.mark.parametrize(
    ("gpus", "device", "ranks"), [(None, "auto", 1), (0, "cpu", 1), (1, "cuda", 1), (4, "cuda", 4)]
)
def test_gpus_choose_the_device_and_how_many_ranks_learn(gpus: int | None, device: str, ranks: int) -> None:
    made = make_algorithm(Settings(options=of_gpus(gpus)), RolloutConfig())
    assert (made.device, made.ranks) == (device, ranks)


def test_fewer_gpus_than_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="--gpus is -1"):
        of_gpus(-1)


EVERYTHING = """
model: {name: calc, dtype: float32, lora_rank: 4, backend: embedded}
training: {algorithm: DAPO, save_every: 3, max_tokens: 99, train_agents: solver, tasks_per_step: 5, credit: per_turn}
"""


def test_the_file_has_all_settings_of_the_algorithm(tmp_path: Path) -> None:
    made = make_algorithm(read_settings(write(tmp_path, EVERYTHING), {}), RolloutConfig())
    wanted = {"dtype": "float32", "lora_rank": 4, "backend": "embedded", "save_every": 3, "max_tokens": 99}
    wanted |= {"train_agents": "solver", "tasks_per_step": 5, "credit": "per_turn", "dynamic_sampling": 2}
    assert {name: getattr(made, name) for name in wanted} == wanted
    assert make_algorithm(Settings(), RolloutConfig()).max_tokens == 1024


def test_one_of_several_agents_has_an_address_of_its_own() -> None:
    resource = Resource("http://127.0.0.1:1/key/k/rollout/r/attempt/a/v1", "m", "k")
    assert resource.for_agent("a b").model_api == "http://127.0.0.1:1/key/k/rollout/r/attempt/a/agent/a%20b/v1"


@pytest.mark.slow
def test_a_gpu_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    if importlib.import_module("torch").cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, "-m", "agent_lightning.server", "--model", "calc", "--port", "0", "--gpus", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("--gpus is 1, and there is no GPU to train on (")
    assert done.stderr.endswith("Leave it out, or give 0.\n")


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError, match="magic"):
        make_algorithm(Settings(algorithm="magic"), RolloutConfig())


def test_runtime_switches() -> None:
    set_config({"air_enabled": False})
    assert not air.enabled
    enable_air()
    assert air.enabled
    with pytest.raises(ConfigError, match="air_enable "):
        set_config({"air_enable ": True})
    assert current_config()["air_enabled"]


def test_a_server_that_is_not_there_is_named() -> None:
    from agent_lightning import Client

    before = dict(os.environ)
    with pytest.raises(ServerConnectionError, match=r"agent_lightning\.server"):
        Client("http://127.0.0.1:9").train(lambda resource, task: 1.0)
    assert dict(os.environ) == before, "keys are there while agents run, and no longer"
