"""The trainer as older scripts make it: parts described instead of given, words of then, algorithms of one's own."""

# What is old is there while the program runs, not for the checker.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.metrics import SilentConsole

pytestmark = pytest.mark.usefixtures("in_its_own_folder")


@pytest.fixture
def in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@agl.rollout
def answers(task: str, prompt_template: agl.PromptTemplate) -> float:
    return float(prompt_template.format(task=task) == "Do: a")


class Own(agl.Algorithm):
    """Brings its own tasks, and uses what algorithms could ask for."""

    found: Any = None

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        assert train_dataset is None
        store, adapter = self.get_store(), self.get_adapter()
        assert self.get_llm_proxy() is None
        assert self.get_initial_resources() == {"prompt_template": agl.PromptTemplate(template="Do: {task}")}
        rollout = await store.enqueue_rollout("a", mode="train")
        (finished,) = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=60)
        spans = await store.query_spans(rollout.rollout_id)
        Own.found = (finished.status, adapter(spans), agl.find_final_reward(spans))


def test_fit_without_tasks_for_an_algorithm_that_brings_its_own() -> None:
    trainer = agl.Trainer(
        algorithm=Own,
        adapter={"agent_match": "solver", "repair_hierarchy": True},
        strategy="shm",
        n_runners=2,
        tracer="agentlightning.DummyTracer",
        store={"type": "agentlightning.InMemoryLightningStore", "thread_safe": True},
        initial_resources={"prompt_template": agl.PromptTemplate(template="Do: {task}")},
        max_tasks=3,
        daemon=True,
        console=SilentConsole(),
    )
    assert isinstance(trainer.tracer, agl.DummyTracer)
    assert trainer.adapter.agent_match == "solver"
    assert (trainer.n_runners, trainer.max_rollouts, trainer.strategy.runners) == (2, 3, "inline")
    trainer.fit(answers)
    assert Own.found == ("succeeded", [], 1.0)


def test_an_agent_knows_its_trainer() -> None:
    found: list[Any] = []

    class Asking(agl.LitAgent[str]):
        def rollout(self, task: str, resources: Any, rollout: Any) -> float:
            found.append((self.trainer, self.get_trainer()))
            return 1.0

    agent = Asking()
    with pytest.raises(ValueError, match="There is no trainer here"):
        _ = agent.trainer
    trainer = agl.Trainer(console=SilentConsole())
    trainer.fit(agent, ["a"])
    assert found == [(trainer, trainer)]
    agent.set_trainer(other := agl.Trainer(console=SilentConsole()))
    assert agent.trainer is other


def test_a_strategy_of_then_says_how_many_runners() -> None:
    trainer = agl.Trainer(strategy=agl.SharedMemoryExecutionStrategy(n_runners=3), n_runners=1)
    assert (trainer.n_runners, trainer.strategy.runners) == (3, "inline")
    trainer = agl.Trainer(strategy="cs", n_runners=2)
    assert (trainer.n_runners, trainer.strategy.runners) == (2, "processes")
    described: Any = {"type": "cs", "n_runners": 4}
    trainer = agl.Trainer(strategy=described)
    assert (trainer.n_runners, trainer.strategy.runners) == (4, "processes")
    with pytest.raises(agl.ConfigError, match="'inline', 'processes', 'ray' or 'remote'"):
        agl.Trainer(strategy="ipc")


def test_dev_is_a_dry_run() -> None:
    assert isinstance(agl.Trainer(dev=True).algorithm, agl.Baseline)
    dry = agl.Trainer(dev=True, algorithm=agl.GRPO(model="calc", kl_coef=0.1)).algorithm
    assert isinstance(dry, agl.Baseline)
    assert dry.policy is not None
    assert (dry.policy.model.model, dry.policy.model.reference) == ("calc", None)
    assert isinstance(agl.Trainer(dev=False, algorithm=agl.FastAlgorithm).algorithm, agl.Baseline)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("ipc", "no import path"),
        ("agentlightning.Nothing", "cannot be imported"),
        ({"n": 1}, "without 'type'"),
        (3, "describes no object"),
        (dict, "is no Tracer"),
    ],
)
def test_what_describes_no_component_is_refused(spec: Any, words: str) -> None:
    with pytest.raises(agl.ConfigError, match=words):
        agl.build_component(spec, expected_type=agl.Tracer)


def test_components_are_built_with_what_they_take() -> None:
    made = agl.build_component(
        {"type": "agentlightning.TracerTraceToTriplet", "agent_match": "a"},
        optional_defaults={"llm_call_match": "b", "port": 1},
    )
    assert (made.agent_match, made.llm_call_match) == ("a", "b")
    assert agl.build_component(None) is None
    assert isinstance(agl.build_component(agl.OtelTracer), agl.OtelTracer)


def test_no_agent_needs_runners_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(agl.ConfigError, match="strategy='remote'"):
        agl.Trainer(console=SilentConsole()).fit(None, ["a"])
    monkeypatch.setenv("AGL_STORE_KEY", "k" * 32)
    monkeypatch.setenv("AGL_SERVER_PORT", "0")

    class Nothing(agl.Algorithm):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            assert list(train_dataset) == ["a"]

    agl.Trainer(algorithm=Nothing(), strategy="remote", console=SilentConsole()).fit(None, ["a"])


def test_an_algorithm_that_serves_its_own_model_takes_no_proxy() -> None:
    with pytest.raises(agl.ConfigError, match="leave llm_proxy out"):
        agl.Trainer(algorithm=agl.GRPO(model="calc"), llm_proxy=agl.LLMProxy())


SCRIPT = """
import asyncio
import agentlightning as agl

@agl.rollout
def agent(task: str) -> float:
    return 1.0

@agl.algo
async def mine(*, store, adapter, llm_proxy):
    rollouts = await store.enqueue_many_rollouts([agl.EnqueueRolloutRequest(input=str(n)) for n in range(4)])
    done = await store.wait_for_rollouts(rollout_ids=[r.rollout_id for r in rollouts], timeout=60)
    print(sorted(str(r.status) for r in done), type(adapter).__name__, llm_proxy)

if __name__ == "__main__":
    agl.setup_logging()
    agl.Trainer(algorithm=mine, n_workers=2, strategy="cs").fit(agent)
"""


@pytest.mark.slow
def test_a_script_with_processes_and_an_algorithm_in_a_function(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "['succeeded', 'succeeded', 'succeeded', 'succeeded'] TracerTraceToTriplet None" in done.stdout
    assert done.stderr.count("This script uses names of agentlightning 0.2/0.3") <= 1
