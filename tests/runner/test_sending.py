"""Agents on their way to a process on another machine: what arrives there runs, whatever stands beside it."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import agentlightning as agl
from agentlightning.runner.sending import sent
from agentlightning.trainer.checks import as_agent

SOURCE = """
import threading
import agentlightning as agl

lock = threading.Lock()  # cannot be pickled

@agl.rollout
def decorated(task):
    with lock:
        return task * 2.0

def plain(task):
    with lock:
        return task * 3.0

class Kept(agl.LitAgent):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def rollout(self, task, resources, rollout):
        with lock:
            return task * self.factor
"""
ELSEWHERE = """
import pickle, sys
for sent in pickle.load(sys.stdin.buffer):
    print(sent.agent().rollout(2.0, {}, None))
"""


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    """A file of the user's that was loaded under a name of ours, in a package that no other process knows."""
    (tmp_path / "theirs.py").write_text(SOURCE)
    package = ModuleType("a_package_of_theirs")
    package.__path__ = [str(tmp_path)]
    sys.modules["a_package_of_theirs"] = package
    spec = importlib.util.spec_from_file_location("a_package_of_theirs.theirs", tmp_path / "theirs.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def test_agents_beside_what_cannot_be_copied_arrive(module: ModuleType) -> None:
    agents = [module.decorated, module.plain, module.Kept(4.0)]
    travelling = pickle.dumps([sent(as_agent(agent)) for agent in agents])
    there = subprocess.run([sys.executable, "-c", ELSEWHERE], input=travelling, capture_output=True, check=True)
    assert [float(reward) for reward in there.stdout.split()] == [4.0, 6.0, 8.0]


def test_an_agent_that_holds_what_cannot_be_copied_is_refused(module: ModuleType) -> None:
    agent = module.Kept(module.lock)
    with pytest.raises(agl.ConfigError, match="cannot be sent to runners on Ray"):
        sent(agent)
