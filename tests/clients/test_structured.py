"""Real packages asking for JSON answers by a schema: a model that never learned JSON gives them, with exact capture."""

from __future__ import annotations

import importlib
import json
import pkgutil
from typing import Literal

import pytest
from pydantic import BaseModel

import agentlightning as agl
from agentlightning.types import Outcome
from tests.clients import structured
from tests.clients.conftest import World
from tests.clients.test_clients import TASKS, report, summary

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("default"),  # other people's packages
]


class Answer(BaseModel):
    sign: Literal["plus", "minus"]
    even: bool


NAMES = sorted(module.name for module in pkgutil.iter_modules(structured.__path__))


@pytest.mark.parametrize("name", NAMES)
async def test_a_json_answer(world: World, name: str) -> None:
    try:
        package = importlib.import_module(f"tests.clients.structured.{name}")
    except ModuleNotFoundError as error:
        pytest.skip(f"not installed here: {error.name}")
    answers: list[Answer] = []

    async def solve(question: str, llm: agl.LLM, _stream: bool) -> str:
        answer = await package.ask(question, llm, Answer)
        answers.append(Answer.model_validate(answer))
        return json.dumps(answers[-1].model_dump())

    run = await world.run(solve, False, TASKS, scripted=False)
    errors = {r.attempt.error for r in run.rollouts if r.attempt.outcome is not Outcome.OK}
    assert not errors, errors
    assert len(answers) == len(TASKS)
    assert len(run.all_calls()) == len(run.sampled) == run.exact() >= len(TASKS)
    if "CHANGE" in vars(package):  # it has no agents, so that this is its line in the table
        result = {**summary(package, run, False), "required": len(answers) if package.REQUIRES_TOOL else 0}
        report(name, package, result)
