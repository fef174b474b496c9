"""Helpers of older scripts: for algorithms, for events among runners, for command lines, for the trainer's runner."""

# What is old is there while the program runs, not for the checker.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from agentlightning.algorithm.utils import batch_iter_over_dataset, with_llm_proxy, with_store

import agentlightning as agl
from agentlightning.metrics import SilentConsole
from agentlightning.store import InMemoryLightningStore


def test_batches_go_on_for_ever_and_every_pass_has_each_task_once() -> None:
    tasks = list(range(10))
    batches = list(itertools.islice(batch_iter_over_dataset(tasks, 4), 50))
    assert {len(batch) for batch in batches} == {4}
    drawn = [task for batch in batches for task in batch]
    passes = [drawn[n : n + 10] for n in range(0, 200, 10)]
    assert all(sorted(one) == tasks for one in passes)
    assert len({tuple(one) for one in passes}) > 1, "in another order each time"
    assert [len(batch) for batch in itertools.islice(batch_iter_over_dataset([1, 2], 5), 3)] == [5, 5, 5]
    with pytest.raises(ValueError, match="empty"):
        next(batch_iter_over_dataset([], 2))


class Asking(agl.Algorithm):
    """Its methods are given the store and the proxy."""

    said: Any = None

    @with_store
    async def enqueue(self, store: agl.LightningStore, task: str, *, mode: str) -> Any:
        return await store.enqueue_rollout(task, mode=agl.RolloutMode(mode))

    @with_llm_proxy()
    async def ask(self, proxy: Any) -> Any:
        return proxy and proxy.is_running()

    @with_llm_proxy(auto_start=False)
    async def look(self, proxy: Any) -> Any:
        return proxy.is_running()

    @with_llm_proxy(required=True)
    async def insist(self, proxy: Any) -> Any:
        raise AssertionError("there is none")

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        rollout = await self.enqueue("task", mode="val")
        (done,) = await self.get_store().wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=60)
        with pytest.raises(ValueError, match=r"needs Trainer\(llm_proxy=LLMProxy\(…\)\)"):
            await self.insist()
        self.said = done.status, await self.ask()


def test_methods_are_given_what_the_trainer_has(tmp_path: Path) -> None:
    asking = Asking()
    agl.Trainer(algorithm=asking, run_dir=tmp_path / "run", console=SilentConsole()).fit(agl.rollout(lambda task: 1.0))
    assert asking.said == ("succeeded", None)


async def test_methods_are_given_what_was_set() -> None:
    asking, store = Asking(), InMemoryLightningStore()
    with pytest.raises(RuntimeError, match="is run by a Trainer"):
        await asking.enqueue("task", mode="val")
    params = {"model": "openai/m", "api_base": "http://127.0.0.1:9/v1"}
    proxy = agl.LLMProxy(model_list=[{"model_name": "m", "litellm_params": params}], store=store)
    asking.set_store(store)
    asking.set_llm_proxy(proxy)
    rollout = await asking.enqueue("task", mode="val")
    assert [(r.rollout_id, r.mode) for r in await store.query_rollouts()] == [(rollout.rollout_id, "val")]
    assert await asking.ask() is True, "it runs while the method does"
    assert not proxy.is_running()
    assert await asking.look() is False
    await store.close()


@pytest.mark.parametrize("make", [agl.ThreadingEvent, agl.MultiprocessingEvent])
async def test_events_are_set_elsewhere_and_stop_a_runner(make: Any) -> None:
    event = make()
    assert not event.is_set()
    assert event.wait(0.0) is False
    setting = threading.Thread(target=event.set)
    setting.start()
    assert event.wait(60) is True
    setting.join()
    event.clear()
    runner = agl.LitAgentRunner(agl.DummyTracer())
    with runner.run_context(agent=agl.rollout(lambda task: 1.0), store=InMemoryLightningStore()):
        running = asyncio.create_task(runner.iter(event=event))
        event.set()
        async with asyncio.timeout(60):
            await running


@pytest.mark.slow
def test_an_event_reaches_another_process() -> None:
    context = multiprocessing.get_context("spawn")
    event = agl.MultiprocessingEvent(context)
    other = context.Process(target=set_it, args=(event,))
    other.start()
    try:
        assert event.wait(60)
    finally:
        other.join()


def set_it(event: Any) -> None:
    event.set()


@pytest.mark.parametrize(
    ("typed", "runners", "epochs"),
    [
        (["--n-runners", "3", "--baseline.repeats", "2"], 3, 2),
        (["--trainer.n-workers", "3", "--n-epochs", "2"], 3, 2),
        (["--trainer.n_runners=3", "--baseline.n_epochs=2"], 3, 2),
    ],
)
def test_objects_are_made_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, typed: list[str], runners: int, epochs: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", *typed])
    trainer, baseline = agl.lightning_cli(agl.Trainer, agl.Baseline)
    assert (type(trainer), trainer.n_runners) == (agl.Trainer, runners)
    assert (type(baseline), baseline.repeats) == (agl.Baseline, epochs)


class One:
    def __init__(self, name: str, sizes: Any = ()) -> None:
        self.given = name, sizes


class Two(One): ...


def test_one_class_gives_one_object_and_what_is_unclear_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", "--name", "x", "--sizes", "[1, 2]"])
    assert agl.lightning_cli(One).given == ("x", [1, 2])
    with pytest.raises(SystemExit):
        agl.lightning_cli(One, Two)
    assert "write one of: --one.name, --two.name" in capsys.readouterr().err


@pytest.mark.parametrize(
    "spec",
    [
        agl.LitAgentRunner,
        "agentlightning.LitAgentRunner",
        {"type": "agentlightning.LitAgentRunner", "max_rollouts": 2, "poll_interval": 0.1},
        {"max_rollouts": 2},
        agl.LitAgentRunner(agl.DummyTracer()),
    ],
)
def test_a_runner_that_is_described_is_the_trainers_own(tmp_path: Path, spec: Any) -> None:
    ran: list[str] = []

    @agl.rollout
    def agent(task: str) -> float:
        ran.append(task)
        return 1.0

    trainer = agl.Trainer(runner=spec, run_dir=tmp_path / "run", console=SilentConsole())
    assert trainer.max_rollouts == (2 if isinstance(spec, dict) else None)
    trainer.fit(agent, ["a", "b"])
    assert sorted(ran) == ["a", "b"]


class OwnRunner(agl.LitAgentRunner): ...


@pytest.mark.parametrize("spec", [OwnRunner, OwnRunner(agl.DummyTracer()), "somewhere.OwnRunner"])
def test_a_runner_of_ones_own_is_refused(spec: Any) -> None:
    with pytest.raises(agl.ConfigError, match=r"runner= is OwnRunner; a trainer's runners are LitAgentRunners. Hooks"):
        agl.Trainer(runner=spec)


def test_without_langchain_there_is_no_handler_for_it() -> None:
    """With it: `tests/clients/test_tracers.py`."""
    if find_spec("langchain_core") is None:
        assert agl.OtelTracer().get_langchain_handler() is None
