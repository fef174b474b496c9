"""Kills a part of a training run, ten times in its middle, and looks whether anything was lost or done twice.

    python scripts/kills.py [model rank host postgres replica ray_rank ray_node] [--kills 10]
        [--vllm .vllm/bin/vllm] [--json]

The calculator agent trains; a part of the run is killed with kill -9 at a random moment of a step: the model's process,
a rank of the learner, a host of runners (another takes its place), the PostgreSQL server that holds the store (started
again after a while), a vLLM replica (needs --vllm, see scripts/vllm_cpu.py), a learner rank on a Ray cluster of three
nodes, or the whole node with a rank, for which another node joins (both need Ray). The next kill comes when a step has
been done since. For each part a row: steps and seconds, rollouts and attempts made, attempts still open, rollouts with
no or two attempts that ended well, ended rollouts without call or reward, tasks taken twice, and the reward at first
and at last. The exit status is 1 if a run did not end well or the row shows anything lost or twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
KEY = "the key of this script, which nobody else knows"
TASKS, GROUP = 6, 8
MORE_STEPS = 3
"""After the last kill."""
PATIENCE = 300.0
"""Seconds that a step may take, what it takes to recover included."""
AGENT = ROOT / "examples" / "calc" / "calc_agent.py"


class LostError(Exception):
    """What should not have happened."""


def train(spec: dict[str, Any]) -> None:
    """The run, in a process of its own."""
    import agentlightning as agl
    from agentlightning.metrics import SilentConsole
    from agentlightning.store import PostgresLightningStore
    from agentlightning.trainer.example import load_example

    settings: dict[str, Any] = {
        **{"model": "calc", "steps": spec["steps"], "tasks_per_step": TASKS, "group_size": GROUP, "save_every": 1},
        **{"learning_rate": 2e-4, "max_context": 512},
        **{"rollout_config": agl.RolloutConfig(unresponsive_seconds=8.0, timeout_seconds=300.0)},
        **spec["settings"],
    }
    store = PostgresLightningStore(spec["dsn"]) if "dsn" in spec else None
    trainer = agl.Trainer(
        algorithm=agl.GRPO(**settings),
        strategy=spec.get("strategy"),
        store=store,
        run_dir=spec["run_dir"],
        console=SilentConsole(),
    )
    trainer.fit(load_example("calc", "calc_agent").calc_agent, load_example("calc", "recipe").train_tasks())


# ---- the run, as it is seen from outside -----------------------------------------------------------------------------


class Run:
    """A training run, and what of it is killed."""

    def __init__(self, folder: Path, kills: int, stack: ExitStack, environment: Mapping[str, str] = {}) -> None:
        self.folder = folder
        self.steps = 2 * kills + MORE_STEPS  # a step may end in the moment of a kill
        self._kills = kills
        self._stack = stack
        self.environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
        self._metrics = folder / "run" / "metrics.jsonl"
        self.process: subprocess.Popen[Any] | None = None

    def begin(self, **spec: Any) -> None:
        """Start training."""
        spec = {"run_dir": str(self.folder / "run"), "steps": self.steps, "settings": {}, **spec}
        self.process = self.start("trainer", [sys.executable, __file__, "--train", json.dumps(spec)])

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[Any]:
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment, cwd=ROOT)
        self._stack.callback(kill_family, process.pid)
        return process

    def words(self, name: str = "trainer") -> str:
        return (self.folder / f"{name}.log").read_text()[-3000:]

    @property
    def rows(self) -> list[dict[str, Any]]:
        from agentlightning.metrics import read_metrics

        return [dict(m) for m in read_metrics(self._metrics) if m["step"]] if self._metrics.exists() else []

    def kill_all(self, kill: Callable[[], None]) -> None:
        """Kill as often as is asked, each time within a step, and wait for the run's end."""
        seen = 0
        for number in range(1, self._kills + 1):
            rows = self._wait_for(seen + 1)
            usual = min(row["sampling_seconds"] + row["learning_seconds"] for row in rows)
            time.sleep(random.uniform(0.0, usual))
            kill()
            seen = len(self.rows)
            print(f"  {number} killed after step {seen}", file=sys.stderr, flush=True)
        self.finish()

    def finish(self) -> None:
        """Wait for the run's end."""
        self._wait_for(self.steps)
        assert self.process is not None
        if self.process.wait(60):
            raise LostError(f"The run ended with {self.process.returncode}: {self.words()}")

    def _wait_for(self, steps: int) -> list[dict[str, Any]]:
        assert self.process is not None
        had, deadline = len(self.rows), time.monotonic() + PATIENCE
        while len(rows := self.rows) < steps:
            if len(rows) > had:
                had, deadline = len(rows), time.monotonic() + PATIENCE
            if self.process.poll() is not None and len(self.rows) < steps:
                raise LostError(f"The run ended after {len(rows)} steps: {self.words()}")
            if time.monotonic() > deadline:
                raise LostError(f"No step for {PATIENCE:g} s after {len(rows)} steps: {self.words()}")
            time.sleep(0.05)
        return rows

    def family(self, *words: str) -> list[psutil.Process]:
        """The processes of the run whose command lines hold these words, as soon as there are some."""
        deadline = time.monotonic() + PATIENCE
        while not (found := self._family(words)):
            if time.monotonic() > deadline:
                raise LostError(f"No process of the run is called {' '.join(words)}: {self.words()}")
            time.sleep(0.05)
        return found

    def _family(self, words: Sequence[str]) -> list[psutil.Process]:
        assert self.process is not None
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if all(word in " ".join(process.cmdline()) for word in words):
                    found.append(process)
        return sorted(found, key=lambda p: p.create_time())


def kill_family(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in [top, *top.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs([top], timeout=30)


# ---- what is killed --------------------------------------------------------------------------------------------------

MODEL = "agentlightning.backend.embedded"


def model(run: Run, _: argparse.Namespace) -> str | None:
    run.begin()
    run.kill_all(lambda: run.family(MODEL)[0].kill())
    return None


def rank(run: Run, _: argparse.Namespace) -> str | None:
    run.begin(settings={"ranks": 2})
    run.kill_all(lambda: run.family("agentlightning.backend.embedded.rank")[-1].kill())
    return None


def host(run: Run, _: argparse.Namespace) -> str | None:
    port = random.randint(20000, 30000)
    run.environment |= {"AGL_STORE_KEY": KEY, "AGL_SERVER_HOST": "127.0.0.1", "AGL_SERVER_PORT": str(port)}
    run.begin(strategy="remote")
    command = [sys.executable, "-m", "agentlightning", "runner", "--server", f"http://127.0.0.1:{port}"]
    command += ["--agent", f"{AGENT}:calc_agent", "--concurrency", "24"]
    hosts = [run.start("host", command) for _ in range(2)]

    def kill() -> None:
        kill_family(hosts.pop(0).pid)
        hosts.append(run.start("host", command))

    run.kill_all(kill)
    return None


def postgres(run: Run, _: argparse.Namespace) -> str | None:
    from tests.store.postgres_server import PostgresServer, find_binaries

    binaries = find_binaries()
    if binaries is None:
        raise SystemExit("PostgreSQL is not installed (Debian and Ubuntu: apt-get install postgresql).")
    server = PostgresServer(binaries, durable=True)
    run._stack.callback(server.close)
    server.start()
    run.begin(dsn=server.address)

    def kill() -> None:
        server.kill()
        time.sleep(random.uniform(0.5, 3.0))
        server.start()

    run.kill_all(kill)
    return server.address


def replica(run: Run, given: argparse.Namespace) -> str | None:
    if given.vllm is None:
        raise SystemExit("Say where vLLM's program is: --vllm $(python scripts/vllm_cpu.py --no-tests | tail -1)")
    options = {"replicas": 2, "command": str(given.vllm), "restarts": 1000}
    run.begin(settings={"backend": "vllm", "backend_options": options})
    run.kill_all(lambda: random.choice(run.family("vllm", " serve ")).kill())
    return None


def ray_rank(run: Run, given: argparse.Namespace) -> str | None:
    return _on_ray(run, given, "rank")


def ray_node(run: Run, given: argparse.Namespace) -> str | None:
    return _on_ray(run, given, "node+")


def _on_ray(run: Run, given: argparse.Namespace, what: str) -> str | None:
    """The cluster kills its parts itself, after the first step and each one that follows a kill."""
    run.environment |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "tests.backend.ray.three_nodes", str(run.folder / "run"), str(run.steps)]
    run.process = run.start("trainer", [*command, *[f"{what}@1"] * given.kills])
    run.finish()
    return None


PARTS: dict[str, Callable[[Run, argparse.Namespace], str | None]] = {
    each.__name__: each for each in (model, rank, host, postgres, replica, ray_rank, ray_node)
}
"""Each returns where the store is, if it is not in the run's folder."""
ALONE = {"replica", "ray_rank", "ray_node"}
"""Those that need an environment of their own, and are not run unless they are named."""

# ---- what became of it -----------------------------------------------------------------------------------------------


async def found_in(dsn: str | None, run: Run) -> dict[str, int]:
    """What the store says of the rollouts."""
    from agentlightning.store import PostgresLightningStore, SqliteLightningStore
    from agentlightning.types import FINISHED_ATTEMPT, AttemptStatus, RolloutStatus
    from agentlightning.types.reward import find_final_reward

    store = PostgresLightningStore(dsn) if dsn else SqliteLightningStore(run.folder / "run" / "store.db")
    try:
        rollouts = list(await store.query_rollouts(limit=-1))
        good = [r for r in rollouts if r.status is RolloutStatus.SUCCEEDED]
        attempts = {r.rollout_id: list(await store.query_attempts(r.rollout_id)) for r in rollouts}
        records = await store.query_records([r.rollout_id for r in good])
    finally:
        await store.close()
    well = [sum(a.status is AttemptStatus.SUCCEEDED for a in attempts[r.rollout_id]) for r in good]
    return {
        "rollouts": len(good),
        "attempts": sum(map(len, attempts.values())),
        "open": sum(a.status not in FINISHED_ATTEMPT for of in attempts.values() for a in of),
        "not once": sum(count != 1 for count in well),
        "incomplete": sum(not r.calls or find_final_reward(list(r.spans)) is None for r in records),
    }


def judged(run: Run, found: Mapping[str, int], seconds: float) -> dict[str, Any]:
    """The row of a part; raises `LostError` where something is lost or done twice."""
    rows = run.rows
    taken = Counter(task for row in rows for task in row["tasks"])
    row = {
        "steps": len(rows),
        "seconds": round(seconds),
        **found,
        "tasks twice": sum(count > 1 for count in taken.values()),
        "reward": f"{rows[0]['reward']:.2f} to {rows[-1]['reward']:.2f}",
    }
    whole = [r["step"] for r in rows] == list(range(1, run.steps + 1)) and found[
        "rollouts"
    ] >= run.steps * TASKS * GROUP
    if not whole or any(row[key] for key in ("open", "not once", "incomplete", "tasks twice")):
        raise LostError(json.dumps(row))
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; by default all but the last three"
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--vllm", type=Path, help="the `vllm` program for the part 'replica'")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON object at the end")
    parser.add_argument("--train", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if given.train:
        train(given.train)
        return 0
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    rows: dict[str, Any] = {}
    for name in given.parts or [part for part in PARTS if part not in ALONE]:
        folder = Path(mkdtemp(prefix=f"agl-kills-{name}-"))
        with ExitStack() as stack:
            run, began = Run(folder, given.kills, stack), time.monotonic()
            try:
                dsn = PARTS[name](run, given)
                rows[name] = judged(run, asyncio.run(found_in(dsn, run)), time.monotonic() - began)
                said = ", ".join(f"{key} {value}" for key, value in rows[name].items())
            except LostError as error:
                rows[name], said = None, f"NOT AS IT SHOULD BE (what is left of it: {folder}): {error}"
        if rows[name]:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"{name:10} killed {given.kills} times: {said}", flush=True)
    if given.json:
        print(json.dumps(rows))
    return 0 if all(rows.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
