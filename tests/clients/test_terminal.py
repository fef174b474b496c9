"""`examples/terminal` with the real Codex in its sandbox, before an engine that repairs: every token that the engine
sampled is captured, and the demonstrations that the small model is taught are, token by token, what Codex sends.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from renderers import Qwen3Renderer
from transformers import AutoTokenizer

from agentlightning.engine.base import Engine
from agentlightning.errors import ConfigError
from agentlightning.gateway import Gateway
from agentlightning.models import resolve_model
from agentlightning.rendering import load_rendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Outcome
from agentlightning.types.reward import find_final_reward
from examples.terminal.demonstrations import ending, repaired
from examples.terminal.program import Repairer, make_agent
from examples.terminal.prompts import TOOLS, call, conversation, shown
from examples.terminal.repositories import ISSUE, as_task, make_repository, make_tests
from examples.tools.demonstration import Demonstration
from examples.tools.make_model import row_of
from tests.clients.conftest import Run, SayingEngine, WitnessedEngine, World, carried_out

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("default"),  # other people's packages
]

TASKS = 8
ANSWER = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
HEAD = re.compile(r"Chunk ID: ([0-9a-f]{6})\nWall time: ([0-9.]+) seconds\n")
WEIGHTS = (
    {"right": 1.0, "special": 0.0, "checks": 1.0, "mends": 1.0},
    {"right": 0.0, "special": 0.5, "checks": 1.0, "mends": 1.0},
)
Turns = tuple[str, ...]


def repairing(turns: dict[str, Turns]) -> Callable[[str], str]:
    """Says turn by turn what was demonstrated for the module whose failed test it was told of, and before that runs
    the tests.
    """

    def say(prompt: str) -> str:
        answers = ANSWER.findall(prompt)
        return next(iter(turns.values()))[0] if not answers else turns[output(answers[0])][len(answers)]

    return say


def output(answer: str) -> str:
    return answer.partition("Output:\n")[2]


@pytest.fixture(scope="module")
def codex() -> Repairer:
    try:
        return make_agent()
    except ConfigError as error:
        pytest.skip(str(error))


async def test_demonstrations_are_what_codex_sends(world: World, codex: Repairer) -> None:
    """Repairs that succeed, and some that do not: every result and every token of the whole rollout."""
    tokenizer, rng = AutoTokenizer.from_pretrained(resolve_model("calc")), random.Random(0)
    tasks, turns, ended = [], {}, {}
    for n in range(TASKS):
        repository = make_repository(rng)
        tests = make_tests(repository, rng)
        task = as_task(repository, tests)
        commands, results = repaired(repository, [found[0] for found in tests], rng, WEIGHTS[n % 2])
        tasks.append(task)
        turns[results[0][0]] = (*map(call, commands), ending(commands))
        ended[task["files"][task["module"]]] = results
    assert len(turns) == TASKS, "each module is known by the test that fails"
    run = await run_all(world.process, codex, tasks, turns)
    assert {r.attempt.outcome for r in run.rollouts} == {Outcome.OK}, {r.attempt.error for r in run.rollouts}
    assert run.exact() == len(run.all_calls()) == len(run.sampled) == sum(map(len, turns.values()))
    assert run.continued() == len(run.all_calls()) - TASKS, "each call goes on from the one before"
    for rollout in run.rollouts:
        results = ended[rollout.input["files"][rollout.input["module"]]]
        right = float(results[-1][1] == 0 and "sed" in turns[results[0][0]][2] and not special(turns[results[0][0]]))
        assert find_final_reward(run.spans[rollout.rollout_id]) == right
        last = run.calls[rollout.rollout_id][-1]
        ids = [*last.prompt_ids.tolist(), *last.response_ids.tolist()]
        heads = [HEAD.match(answer) for answer in ANSWER.findall(tokenizer.decode(ids, skip_special_tokens=False))]
        told = [
            shown(text, code, head[1], float(head[2]))
            for (text, code), head in zip(results, heads, strict=True)
            if head is not None
        ]
        demonstration = Demonstration(conversation(ISSUE), turns[results[0][0]], tuple(told), TOOLS)
        assert row_of(demonstration, tokenizer, Qwen3Renderer(tokenizer))[0] == ids


def special(turns: Turns) -> bool:
    """Whether the last change writes a value in place of what computes it."""
    changes = [turn for turn in turns if "sed -i" in turn]
    return changes[-1].split("/")[2].isdigit()


async def run_all(process: Engine, agent: Repairer, tasks: list[Any], turns: dict[str, Turns]) -> Run:
    engine = WitnessedEngine(SayingEngine(process, repairing(turns), max_context=16_384))
    store = InMemoryLightningStore()
    gateway = Gateway(store, engine, load_rendering(resolve_model("calc")))
    return await carried_out(agent, tasks, engine, store, gateway)
