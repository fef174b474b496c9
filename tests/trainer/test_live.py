"""A run can be looked at while it goes on, from other processes, and is data when it is over."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.dashboard import served_with_dashboard
from agentlightning.metrics import SilentConsole, Sink
from agentlightning.metrics.standing import standing, standing_in
from agentlightning.store import InMemoryLightningStore, SqliteLightningStore
from agentlightning.trainer.folder import STORE_FILE
from agentlightning.trainer.live import LIVE_FILE, RUN_FILE, announced, connect, served_file
from agentlightning.types import Run, RunStatus
from tests.typed import agl as agl_typed


class Remembers(Sink):
    """A user's own sink."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def start(self, run: Run) -> None:
        self.seen.append(f"start {run.algorithm}")

    def step(self, metrics: Mapping[str, Any]) -> None:
        self.seen.append(f"step {metrics['step']}")

    def note(self, text: str) -> None:
        self.seen.append(f"note {text}")

    def close(self) -> None:
        self.seen.append("close")


class Breaks(Sink):
    def step(self, metrics: Mapping[str, Any]) -> None:
        raise RuntimeError("the tracker is down")


class Steps(agl.Algorithm):
    """Runs rollouts and tells; no model. Waits for `go_on` after its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.first_done, self.go_on = asyncio.Event(), asyncio.Event()
        self.fails: BaseException | None = None

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        context = self.context
        for step in range(2):
            rollout = await context.store.enqueue_rollout(step, run_id=context.run_id)
            await context.store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=60.0)
            context.reporter.step({"step": step, "reward": 1.0})
            context.reporter.warn(f"after step {step}")
            self.first_done.set()
            await self.go_on.wait()
        context.reporter.note("all done")
        if self.fails:
            raise self.fails


@agl.rollout
async def agent(task: int) -> float:
    return 1.0


async def agl_command(*arguments: str) -> str:
    """The command in a process of its own, as in another terminal."""
    done = await asyncio.to_thread(agl_typed, Path.cwd(), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.timeout(300)
async def test_a_run_is_read_while_it_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    algorithm, sink = Steps(), Remembers()
    trainer = agl.Trainer(algorithm=algorithm, run_dir=tmp_path, console=SilentConsole(), sinks=[sink, Breaks()])
    fit = asyncio.create_task(trainer.fit_async(agent, [0]))
    await asyncio.wait_for(algorithm.first_done.wait(), 60)
    assert (tmp_path / LIVE_FILE).stat().st_mode & 0o777 == 0o600
    client = await connect(tmp_path)
    assert client is not None
    (run,) = await client.query_runs()
    assert (run.status, run.algorithm, run.agent) == (RunStatus.RUNNING, "Steps", "agent")
    await client.close()
    assert "task  0" in await agl_command("show", str(tmp_path))
    assert "succeeded" in await agl_command("store", "statistics", str(tmp_path))
    assert "is going on" in await _refused("store", "--path", str(tmp_path / STORE_FILE), "prune", "--keep", "0")
    algorithm.go_on.set()
    await fit
    assert not (tmp_path / LIVE_FILE).exists()
    assert sink.seen == ["start Steps", "step 0", "step 1", "note all done", "close"]
    assert caplog.text.count("The sink Breaks failed") == 1
    assert "task  0" in await agl_command("show", str(tmp_path))
    store = SqliteLightningStore(tmp_path / STORE_FILE)
    (run,) = await store.query_runs()
    events = await store.query_run_events(run.run_id)
    assert (run.status, run.error, run.state["step"]) == (RunStatus.SUCCEEDED, None, 1)
    assert {(e.kind, e.step, e.data.get("text")) for e in events} == {
        ("step", 0, None),
        ("step", 1, None),
        ("warning", None, "after step 0"),
        ("warning", None, "after step 1"),
        ("note", None, "all done"),
    }
    assert {rollout.run_id for rollout in await store.query_rollouts()} == {run.run_id}
    await store.close()


async def _refused(*arguments: str) -> str:
    done = await asyncio.to_thread(agl_typed, Path.cwd(), *arguments)
    assert done.returncode == 1
    return " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize(
    ("error", "status", "word"),
    [
        (None, RunStatus.SUCCEEDED, "succeeded"),
        (agl.AgentError("no luck"), RunStatus.STOPPED, "stopped"),
        (agl.ModelError("no luck"), RunStatus.FAILED, "failed"),
        (ValueError("no luck"), RunStatus.FAILED, "failed"),
        (asyncio.CancelledError(), RunStatus.STOPPED, "stopped by you"),
    ],
)
async def test_how_a_run_ended_is_in_its_store_and_in_its_folder(
    tmp_path: Path, error: BaseException | None, status: RunStatus, word: str
) -> None:
    algorithm, store = Steps(), InMemoryLightningStore()
    algorithm.fails = error
    algorithm.go_on.set()
    trainer = agl.Trainer(algorithm=algorithm, run_dir=tmp_path, console=SilentConsole(), store=store)
    with nullcontext() if error is None else pytest.raises(type(error)):
        await trainer.fit_async(agent, [0])
    (run,) = await store.query_runs()
    why = "no luck" if isinstance(error, Exception) else None
    assert (run.status, run.error) == (status, why)
    assert run.end_time is not None
    assert standing(run.status, run.error, alive=False) == standing_in(tmp_path) == (word, why)
    await store.close()


async def test_two_runs_in_one_store_keep_apart(tmp_path: Path) -> None:
    store = InMemoryLightningStore()
    seen: dict[str, set[str | None]] = {"a": set(), "b": set()}

    def recording(name: str) -> Any:
        @agl.rollout
        async def watches(task: int, rollout: agl.Rollout) -> float:
            seen[name].add(rollout.run_id)
            return 1.0

        return watches

    runs = []
    for name in seen:
        algorithm = Steps()
        algorithm.go_on.set()
        trainer = agl.Trainer(algorithm=algorithm, run_dir=tmp_path / name, console=SilentConsole(), store=store)
        runs.append(trainer.fit_async(recording(name), [0]))
    await asyncio.gather(*runs)
    assert len(seen["a"]) == len(seen["b"]) == 1
    assert seen["a"] != seen["b"]
    assert {run.run_id for run in await store.query_runs()} == seen["a"] | seen["b"]
    await store.close()


def test_a_killed_run_died_and_one_of_an_earlier_version_ended(tmp_path: Path) -> None:
    with socket.socket() as answering:
        answering.bind(("127.0.0.1", 0))
        answering.listen()
        live = {"url": f"http://127.0.0.1:{answering.getsockname()[1]}", "key": None, "pid": 1}
        (tmp_path / LIVE_FILE).write_text(json.dumps(live))
        (tmp_path / RUN_FILE).write_text('{"status": "running"}')
        assert standing_in(tmp_path).word == "running"
    assert standing_in(tmp_path).word == "died"
    (tmp_path / RUN_FILE).write_text("{}")
    assert standing_in(tmp_path).word == "ended"


async def test_a_door_that_a_killed_run_left_behind_is_recognised(tmp_path: Path) -> None:
    (tmp_path / LIVE_FILE).write_text(json.dumps({"url": "http://127.0.0.1:9", "key": "k", "pid": os.getpid()}))
    assert await connect(tmp_path) is None
    (tmp_path / LIVE_FILE).write_text("half a fi")
    assert await connect(tmp_path) is None


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [STORE_FILE, "gw.db"])
async def test_a_store_that_somebody_serves_is_read_by_others(tmp_path: Path, name: str) -> None:
    """As while `agl dashboard`, `agl gateway` or `agl store` is open: one process alone may open the file."""
    file = tmp_path / name
    store = SqliteLightningStore(file)
    await store.enqueue_rollout("a task")
    server = served_with_dashboard(store, port=0, admin_key="a key")
    await server.start()
    with announced(file, server.endpoint, "a key"):
        assert (tmp_path / served_file(file)).stat().st_mode & 0o777 == 0o600
        assert await connect(tmp_path) is None, "no run goes on"
        assert "queuing" in await agl_command("store", "statistics", str(file))
        assert server.endpoint in await agl_command("dashboard", str(file), "--no-open")
    assert not (tmp_path / served_file(file)).exists()
    await server.stop()
    await store.close()
