"""A run's metrics are among those that Prometheus collects from the machines of a cluster."""

from __future__ import annotations

import time
import urllib.request

import pytest

from agentlightning.errors import ConfigError
from agentlightning.metrics.trackers import RaySink
from agentlightning.types import Run

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]
RUNS = [Run(run_id=f"run-{name}", state={"run_dir": f"/runs/{name}"}) for name in ("mail", "calc")]


def exported() -> str:
    (node,) = ray.nodes()
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(address, timeout=10) as answer:
        return answer.read().decode()


@pytest.mark.filterwarnings("ignore")
def test_the_metrics_of_two_runs_are_exported() -> None:
    sinks = [RaySink(), RaySink()]
    for number, (sink, run) in enumerate(zip(sinks, RUNS, strict=True)):
        sink.start(run)
        if number == 0:
            with pytest.raises(ConfigError, match="backend='ray'"):
                sink.step({"step": 1, "reward": 0.5})
            ray.init(num_cpus=1, include_dashboard=False)
    try:
        for sink, reward in zip(sinks, (0.25, 0.75), strict=True):
            for step in (1, 2):
                sink.step({"step": step, "reward": reward, "reward/format": 1.0, "note": "x", "loss": float("nan")})
        lines: dict[str, str] = {}
        deadline = time.monotonic() + 60
        while len(lines) < 4 and time.monotonic() < deadline:
            time.sleep(1.0)
            samples = (line.rpartition(" ") for line in exported().splitlines() if "ray_agentlightning_reward" in line)
            lines = {name: value for name, _, value in samples if not name.startswith("#")}
    finally:
        ray.shutdown()
    for run, reward in (("mail", "0.25"), ("calc", "0.75")):
        (own,) = [name for name in lines if name.startswith("ray_agentlightning_reward{") and f'run="{run}"' in name]
        assert f'run_id="run-{run}"' in own
        assert lines[own] == reward
