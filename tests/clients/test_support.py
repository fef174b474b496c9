"""`examples/support` with the real tau2, before an engine that solves cases as tau2 expects, or does nothing: in all
four domains tau2's evaluator gives 1 and 0, every token is the one that was sampled, calls go on from the tokens of the
one before, and what the small model is taught is what the agent says, token by token.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.gateway import Gateway
from agentlightning.models import resolve_model
from agentlightning.rendering import load_rendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Outcome
from agentlightning.types.reward import find_final_reward
from examples.support.prompts import call
from examples.support.script import Script
from tests.clients.conftest import Run, SayingEngine, WitnessedEngine, World, carried_out

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("default"),  # other people's packages
]

TASKS = 6
TURN = "<|im_start|>assistant"
DOMAINS = ["mock", "airline", "retail", "telecom"]


def installed() -> None:
    pytest.importorskip("tau2.registry", reason="tau2 is not installed here: examples/support/requirements.txt")


def chosen(domain: str) -> list[dict[str, Any]]:
    """Tasks of tau2's own in which something is to be done, with different openings."""
    from examples.support.domains import load_tasks

    found: dict[str, dict[str, Any]] = {}
    for task in load_tasks(domain)["base"]:
        wanted = task["task"]["evaluation_criteria"]
        changes = [a for a in wanted.get("actions") or [] if not a["name"].startswith(("get_", "find_", "search_"))]
        if changes and "message_history" not in task["task"].get("initial_state", {}):
            found.setdefault(opening(task), task)
    return list(found.values())[:TASKS]


def opening(task: dict[str, Any]) -> str:
    told = task["task"]["user_scenario"]["instructions"]
    return Script(told if isinstance(told, str) else told["reason_for_call"]).opening()


def expected(task: dict[str, Any]) -> list[str]:
    """What an agent says that does what tau2 expects: a turn for each action, its user's too, and what it has to tell."""
    criteria = task["task"]["evaluation_criteria"]
    turns = []
    for action in criteria["actions"]:
        if action["requestor"] == "user":
            given = ", ".join(f"{name}={value!r}" for name, value in action["arguments"].items())
            turns.append(f"Please do {action['name']}({given}).")
        else:
            turns.append(call(action["name"], **action["arguments"]))
    return [*turns, f"Done. {'; '.join(criteria.get('communicate_info') or [])}"]


def oracle(tasks: list[dict[str, Any]]) -> Callable[[str], str]:
    """Says what is expected, by the opening in the prompt and the number of turns after tau2's greeting."""

    def say(prompt: str) -> str:
        task = next(t for t in tasks if f"user\n{opening(t)}<|im_end|>" in prompt)
        return expected(task)[prompt.count(TURN) - 2]

    return say


async def run(world: World, tasks: list[dict[str, Any]], say: Callable[[str], str]) -> Run:
    from examples.support.support_agent import support_agent

    engine = WitnessedEngine(SayingEngine(world.process, say, max_context=65_536))
    store = InMemoryLightningStore()
    gateway = Gateway(store, engine, load_rendering(resolve_model("calc")))
    return await carried_out(support_agent, tasks, engine, store, gateway)


@pytest.mark.parametrize("domain", DOMAINS)
async def test_what_is_expected_earns_one_and_every_token_is_the_sampled_one(world: World, domain: str) -> None:
    installed()
    tasks = chosen(domain)
    done = await run(world, tasks, oracle(tasks))
    assert {r.attempt.outcome for r in done.rollouts} == {Outcome.OK}, {r.attempt.error for r in done.rollouts}
    assert [find_final_reward(done.spans[r.rollout_id]) for r in done.rollouts] == [1.0] * len(tasks)
    turns = sum(len(expected(task)) for task in tasks)
    assert done.exact() == len(done.all_calls()) == turns
    assert done.continued() == turns - len(tasks), "each call goes on from the tokens of the one before"


@pytest.mark.parametrize("domain", DOMAINS)
async def test_doing_nothing_earns_nothing(world: World, domain: str) -> None:
    installed()
    tasks = chosen(domain)
    done = await run(world, tasks, lambda prompt: "Goodbye.")
    assert {r.attempt.outcome for r in done.rollouts} == {Outcome.OK}, {r.attempt.error for r in done.rollouts}
    assert [find_final_reward(done.spans[r.rollout_id]) for r in done.rollouts] == [0.0] * len(tasks)
    assert done.exact() == len(done.all_calls()) == len(tasks)
