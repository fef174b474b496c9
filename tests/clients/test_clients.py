"""Real clients and frameworks, unchanged but for base URL and key: ten rollouts at once, two turns with a tool each.

Every call is captured with exactly the tokens that the engine sampled, under the right rollout and agent. Packages that
are not installed are skipped; `make test-clients` builds the environments for all of them.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.types import Outcome
from tests.clients import agents
from tests.clients.conftest import OTHER, TRAINED, Run, World
from tests.clients.tool import Booking

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("default"),  # other people's packages
]

NAMES = sorted(module.name for module in pkgutil.iter_modules(agents.__path__))
TASKS = [
    {"question": f"What is {a} {op} {b}?", "answer": str(answer), "agent": TRAINED if n % 2 == 0 else OTHER}
    for n, (a, op, b, answer) in enumerate(
        [
            (12, "+", 34, 46),
            (90, "-", 25, 65),
            (7, "*", 8, 56),
            (84, "/", 4, 21),
            (51, "+", 9, 60),
            (66, "-", 60, 6),
            (13, "*", 5, 65),
            (45, "/", 9, 5),
            (28, "+", 71, 99),
            (33, "-", 18, 15),
        ]
    )
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", NAMES)
async def test_a_real_client(world: World, name: str, stream: bool) -> None:
    agent = load(name)
    if stream not in agent.STREAMS:
        pytest.skip("has no streaming of its own")
    called = getattr(agent, "NAME", "{}")
    run = await world.run(agent.solve, stream, TASKS, scripted=agent.SCRIPTED, named=not named(agent), name=called)
    result = summary(agent, run, stream)
    report(name, agent, result)
    errors = {r.attempt.error for r in run.rollouts if r.attempt.outcome not in (Outcome.OK, Outcome.TRUNCATED)}
    assert not errors, errors
    assert result["right"] >= (len(TASKS) if agent.SCRIPTED else 6), result
    assert result["calls"] == result["sampled"] == result["exact"] >= 2 * len(TASKS)
    assert result["continued"] == (result["calls"] - len(TASKS) if getattr(agent, "CONTINUES", True) else 0)
    check_attribution(run, called)
    if (reason := getattr(agent, "ASKS_ANEW", None)) is None:
        forks = await world.run(
            agent.solve, stream, TASKS, scripted=agent.SCRIPTED, named=not named(agent), name=called, forks_of=run
        )
        check_forks(run, forks)
    else:
        assert reason, "say why it asks something else each time"


def check_forks(run: Run, forks: Run) -> None:
    """The agent ran again, and was answered from the record token for token: the engine sampled nothing."""
    assert forks.sampled == []
    for original, fork in zip(run.rollouts, forks.rollouts, strict=True):
        assert fork.attempt.outcome is original.attempt.outcome, fork.attempt.error
        before, again = (of.calls[r.rollout_id] for of, r in ((run, original), (forks, fork)))
        same = {(c.prompt_ids.tobytes(), c.response_ids.tobytes(), c.logprobs.tobytes()) for c in before}
        assert len(again) == len(before)
        assert {(c.prompt_ids.tobytes(), c.response_ids.tobytes(), c.logprobs.tobytes()) for c in again} == same
        assert not any(call.info.trained for call in again)


@pytest.mark.parametrize("name", NAMES)
async def test_a_required_tool_is_called_by_its_schema(world: World, name: str) -> None:
    """Where the framework can ask for it: by a model that would never call this tool by itself."""
    agent = load(name)
    if not hasattr(agent, "book_room"):
        pytest.skip("does not ask for a required call")
    booked: list[Booking] = []

    async def solve(question: str, llm: agl.LLM, _stream: bool) -> str:
        booked.append(Booking.model_validate(await agent.book_room(question, llm)))
        return ""

    run = await world.run(solve, False, TASKS, scripted=False)
    errors = {r.attempt.error for r in run.rollouts if r.attempt.outcome is not Outcome.OK}
    assert not errors, errors
    assert len(booked) == len(TASKS)
    assert len(run.all_calls()) == len(run.sampled) == run.exact() >= len(TASKS)
    node = "VERSION" in vars(agent)
    note(
        f"{name}-required",
        {"package": agent.PACKAGE, "wire": agent.WIRE, "node": node, "required": len(booked)},
    )


def named(agent: ModuleType) -> bool:
    """Whether the framework's own name of an agent reaches the gateway."""
    return getattr(agent, "NAMED", False)


def load(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"tests.clients.agents.{name}")
    except ImportError as error:
        if error.path is not None:  # a package that is there, and lacks a name
            raise
        pytest.skip(f"not installed here: {error.name}")  # also one of which only the namespace is there, as google's


def summary(agent: ModuleType, run: Run, stream: bool) -> dict[str, Any]:
    rewards = [
        span.attributes["agentlightning.reward.0.value"]
        for spans in run.spans.values()
        for span in spans
        if "agentlightning.reward.0.value" in span.attributes
    ]
    return {
        "stream": stream,
        "scripted": agent.SCRIPTED,
        "version": vars(agent).get("VERSION") or version(agent.PACKAGE),
        "calls": len(run.all_calls()),
        "sampled": len(run.sampled),
        "exact": run.exact(),
        "continued": run.continued(),
        "rollouts": len(run.rollouts),
        "right": sum(1 for reward in rewards if reward == 1.0),
    }


def check_attribution(run: Run, name: str = "{}") -> None:
    """Agents' names, in the form of `name`, and training follow the task; no span of one rollout is in another."""
    seen: set[str] = set()
    for rollout in run.rollouts:
        wanted = rollout.input["agent"]
        for call in run.calls[rollout.rollout_id]:
            assert call.info.agent == name.format(wanted)
            assert call.info.trained == (wanted == TRAINED)
        spans = run.spans[rollout.rollout_id]
        ids = {span.span_id for span in spans}
        assert not ids & seen
        seen |= ids
        messages = [span for span in spans if span.name == "agentlightning.message"]
        assert all(rollout.input["question"] in str(span.attributes) for span in messages)
        responses = {call.info.response_id for call in run.calls[rollout.rollout_id]}
        assert responses <= {span.attributes.get("gen_ai.response.id") for span in spans}


def report(name: str, agent: ModuleType, result: dict[str, Any]) -> None:
    """A line for the table in the documentation, where somebody asked for it."""
    line = {
        "package": agent.PACKAGE,
        "wire": agent.WIRE,
        "change": agent.CHANGE,
        "named": named(agent),
        "node": "VERSION" in vars(agent),
        **result,
    }
    note(f"{name}-{result['stream']}", line)


def note(name: str, line: dict[str, Any]) -> None:
    if folder := os.environ.get("AGL_CLIENTS_REPORT"):
        Path(folder, f"{name}.json").write_text(json.dumps(line))
