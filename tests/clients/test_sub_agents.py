"""Real frameworks with two agents each, in the framework's own way; and those that sum up: what becomes of the calls.

A script in place of a good model hands over to the agent `helper`, or reads until it is asked for a summary.
"""

from __future__ import annotations

from typing import Any

import pytest

import agentlightning as agl
from agentlightning.gateway import Gateway
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Outcome
from agentlightning.types.call import Call
from tests.clients.conftest import Run, SayingEngine, WitnessedEngine, World, carried_out
from tests.clients.stand_ins import DELEGATES, LONG, READS, SUMMARY, compacting, handing_over
from tests.clients.test_clients import NAMES, load, note

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("default"),  # other people's packages
]


async def bash(command: str) -> str:
    """Runs a command."""
    return LONG


@pytest.mark.parametrize("name", NAMES)
async def test_a_sub_agent_is_a_conversation_of_its_own(world: World, name: str) -> None:
    module = load(name)
    if not hasattr(module, "delegate"):
        pytest.skip("has no agents")

    async def delegate(task: dict[str, Any], llm: agl.LLM) -> float:
        return float("done" in (await module.delegate(task["prompt"], llm)).lower())

    calls = (await ran(world, delegate, DELEGATES, handing_over)).all_calls()
    of_helper = [call for call in calls if (call.info.agent or "").rpartition(".")[2] == "helper"]
    assert of_helper, [call.info.agent for call in calls]
    assert {call.info.agent for call in calls} > {of_helper[0].info.agent}, "the other one has a name of its own"
    if getattr(module, "CONTINUES", True):
        assert not any(map(lost, calls)), [call.info.divergence for call in calls if lost(call)]
    assert not lost(of_helper[0])
    assert of_helper[0].info.parent_call_id is None
    roots = sum(call.info.parent_call_id is None for call in calls)
    tell(name, module, sub_agents="own root", conversations=roots)


@pytest.mark.parametrize("name", NAMES)
async def test_a_conversation_goes_on_from_its_summary(world: World, name: str) -> None:
    module = load(name)
    if not hasattr(module, "compact"):
        pytest.skip("sums nothing up by itself")

    async def compact(task: dict[str, Any], llm: agl.LLM) -> float:
        return float(SUMMARY.split()[-1].strip(".") in await module.compact(task["prompt"], llm, bash))

    run = await ran(world, compact, READS, lambda prompt: compacting(prompt, None))
    calls = run.all_calls()
    prompts = [world.rendering.decode(call.prompt_ids) for call in calls]
    assert any(SUMMARY in prompt for prompt in prompts), "nothing went on from the summary"
    causes = sorted({call.info.divergence.cause for call in calls if call.info.divergence and lost(call)})
    tell(name, module, compaction=f"worked{f' ({causes[0]})' if causes else ''}")


async def ran(world: World, solve: Any, task: dict[str, str], say: Any) -> Run:
    engine = WitnessedEngine(SayingEngine(world.process, say, max_context=200_000))
    store = InMemoryLightningStore()
    gateway = Gateway(store, engine, world.rendering)
    run = await carried_out(agl.rollout(solve), [task], engine, store, gateway)
    (rollout,) = run.rollouts
    assert rollout.attempt.outcome is Outcome.OK, rollout.attempt.error
    assert run.exact() == len(run.all_calls()) == len(run.sampled)
    (spans,) = run.spans.values()
    assert [s.attributes.get("agentlightning.reward.0.value") for s in spans].count(1.0) == 1
    return run


def lost(call: Call) -> bool:
    return call.info.divergence is not None and call.info.divergence.tokens_lost > 0


def tell(name: str, module: Any, **found: Any) -> None:
    about = {"package": module.PACKAGE, "wire": module.WIRE, "node": "VERSION" in vars(module)}
    note(f"{name}-{'-'.join(found)}", {**about, **found})
