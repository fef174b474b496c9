"""Memory is bounded by one pass: many long calls need no more than few."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import ctypes, json, sys
from pathlib import Path
import numpy as np, torch
from agentlightning.learner.base import LossConfig, OptimParams
from agentlightning.learner.packing import CreditedCall, pack, split_by_budget
from agentlightning.learner.policy import load_policy
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.types.call import Call, CallInfo

model, calls, prompt, response = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(1)
learner = TorchLearner(load_policy(model, device="cpu"))
learner.policy.model.config.max_position_embeddings = prompt + response
info = CallInfo("c", "c", "r", "a", 0, "p", True, None, None, "p", "chat", "stop", 0.0, 0.0, 1.0)
rng = np.random.default_rng(0)
credited = []
for number in range(calls):
    ids = rng.integers(0, 250, prompt + response).astype(np.int32)
    ones = np.ones(response, np.float32)
    call = Call(info, ids[:prompt], ids[prompt:], -5 * ones, -5 * ones, ())
    credited.append(CreditedCall(call, number, 0, ones, ones / response))


def status(field):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) / 1024


before = status("VmRSS")
for part in split_by_budget(credited, prompt + response):
    learner.forward_backward(pack(part), LossConfig())
learner.optim_step(OptimParams(learning_rate=1e-4))
print(json.dumps(status("VmHWM") - before))
"""


def peak_mb(model: Path, calls: int, *, prompt: int = 1000, response: int = 100) -> float:
    """What training so many calls of one rollout needs at most, in a process of its own."""
    command = [sys.executable, "-c", SCRIPT, str(model), *map(str, (calls, prompt, response))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the kernel's high-water mark")
def test_a_rollout_of_many_long_calls_needs_no_more_memory_than_one_of_few(tiny_model_dir: Path) -> None:
    few, many = peak_mb(tiny_model_dir, 2), peak_mb(tiny_model_dir, 8)
    assert many < 1.3 * few
