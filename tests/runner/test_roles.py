"""One script in two roles, by the environment alone; and what is wrong with the environment is named."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.errors import ConfigError
from agentlightning.trainer.strategy import Strategy

SCRIPT = """
import os, sys
import agentlightning as agl

def agent(task: int) -> float:
    return float(os.getpid())

algorithm = agl.Baseline()
agl.Trainer(algorithm=algorithm, n_runners=1, run_dir=sys.argv[1]).fit(agent, [1, 2, 3])
print("rewards", *[e.reward for e in algorithm.episodes])
"""


@pytest.mark.slow
def test_one_script_in_two_roles(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "AGL_SERVER_PORT": port, "AGL_STORE_KEY": "secret"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    runner = subprocess.Popen(command, env={**environment, "AGL_CURRENT_ROLE": "runner"})
    try:
        role = {**environment, "AGL_CURRENT_ROLE": "algorithm"}
        done = subprocess.run(command, env=role, capture_output=True, text=True, timeout=60, check=True)
    finally:
        runner.terminate()
        runner.wait(20)
    rewards = done.stdout.split("rewards ")[1].split()
    assert rewards == [f"{runner.pid}.0"] * 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"AGL_CURRENT_ROLE": "boss"}, "both, algorithm or runner"),
        ({"AGL_CURRENT_ROLE": "runner"}, "AGL_STORE_KEY"),
        ({"AGL_CURRENT_ROLE": "runner", "AGL_STORE_KEY": "k", "AGL_SERVER_PORT": "x"}, "no number"),
        ({"AGL_MANAGED_STORE": "perhaps"}, "AGL_MANAGED_STORE is 'perhaps'"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Strategy.read(None, given)


def test_a_variable_that_is_a_switch_takes_the_usual_words() -> None:
    read = [Strategy.read(None, {"AGL_MANAGED_STORE": w}).managed_store for w in ("off", "No", "0", "on", "YES", "")]
    assert read == [False, False, False, True, True, True]
    with pytest.raises(ValueError, match="AGL_MANAGED_STORE"):
        Strategy.read(None, {"AGL_MANAGED_STORE": "flase"})


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ConfigError, match="inline"):
        Strategy.read("threads", {})
    with pytest.raises(ConfigError, match="leave strategy"):
        Strategy.read("inline", {"AGL_CURRENT_ROLE": "runner", "AGL_STORE_KEY": "k"})
