"""vLLM's servers as the engines on Ray: options, and servers that sample, take weights and are replaced on a cluster.

The servers are a program of a few lines, or the real vLLM where AGL_TEST_VLLM names it (`scripts/vllm_cpu.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentlightning.backend import check_backend
from agentlightning.backend.ray.options import parse_options
from agentlightning.errors import ConfigError

from .test_three_nodes import ENVIRONMENT

ROOT = Path(__file__).parents[3]


def fake(folder: Path) -> str:
    """A `vllm` to start."""
    program = folder / "vllm"
    command = f'PYTHONPATH="{ROOT}" exec "{sys.executable}" -m tests.backend.ray.fake_vllm "$@"'
    program.write_text(f"#!/bin/sh\n{command}\n")
    program.chmod(0o755)
    return str(program)


def nodes(program: str, rank: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.backend.ray.vllm_nodes", program, str(rank)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=1400, check=False)


on_a_cluster = [
    pytest.mark.ray,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is tested by `make test-ray`, which installs it"),
]


@pytest.mark.parametrize(
    "rank", [pytest.param(0, marks=on_a_cluster, id="weights"), pytest.param(8, marks=on_a_cluster, id="lora")]
)
def test_servers_on_a_cluster_are_exact_and_replaced(tmp_path: Path, rank: int) -> None:
    done = nodes(os.environ.get("AGL_TEST_VLLM") or fake(tmp_path), rank)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["stranger"] == [401] * 4, "nobody else pauses a server, loads weights or samples"
    assert found["versions"] == [0, 1, 1, 2, 2]
    assert max(found["gaps"]) < 1e-3
    assert found["moved"] > 1e-2
    assert found["new_process"]
    assert bool(found["weights_left"]) == bool(rank), "adapters stay while they are used, all weights do not"
    assert found["left"] == []
    assert "engine 0 (process" in done.stderr, "the end of its actor is named"


@pytest.mark.parametrize("marked", [pytest.param(None, marks=on_a_cluster)])
def test_a_machine_without_vllm_is_named(marked: None) -> None:
    done = nodes("/nowhere/vllm", 0)
    assert done.returncode != 0
    assert "there is no program '/nowhere/vllm' to start vLLM with" in done.stderr
    assert "engine 0 on " in done.stderr


def test_options() -> None:
    given: dict[str, Any] = {"engine": "vllm", "vllm": {"command": "/opt/vllm", "tensor_parallel_size": 4}}
    options = parse_options({**given, "gpus_per_engine": 4})
    assert options.vllm.gpu_memory_utilization == 0.9, "no learner shares its GPUs"
    for wrong, words in (
        ({"vllm": {"command": "/opt/vllm"}}, "needs engine='vllm'"),
        ({**given, "gpus_per_engine": 2}, "tensor_parallel_size or more"),
        ({"engine": "vllm", "vllm": {"gpu_memory_utilization": 2.0}}, "at most 1"),
        ({"engine": "vllm", "vllm": {"replicas": 2}}, "unknown field `replicas`"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_backend("ray", wrong)
