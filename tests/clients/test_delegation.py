"""`examples/delegation` with the real Codex: a planner has its sub-agent asked, and the sub-agent alone is recorded for
training; and two steps on a model that knows nothing yet.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from renderers import Qwen3Renderer
from transformers import AutoTokenizer

import agentlightning as agl
from agentlightning.errors import ConfigError
from agentlightning.gateway import Gateway
from agentlightning.metrics import read_metrics
from agentlightning.models import resolve_model
from agentlightning.rendering import load_rendering
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.trainer.example import load_example
from agentlightning.types import Outcome, RolloutMode
from agentlightning.types.reward import find_final_reward
from examples.terminal.program import make_agent as make_terminal_agent
from examples.terminal.repositories import make_tasks
from tests.clients.test_sql_training import command
from tests.clients.test_terminal_training import installed
from tests.gateway.scripted import ScriptedEngine

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(500),
    pytest.mark.filterwarnings("default"),  # other people's packages
]

RETURNS = {
    "total": "sum({xs})",
    "count": "len({xs})",
    "highest": "max({xs})",
    "lowest": "min({xs})",
    "ranked": "sorted({xs})",
    "above": "[x for x in {xs} if x > {n}]",
    "below": "[x for x in {xs} if x < {n}]",
    "others": "[x for x in {xs} if x != {n}]",
    "raised": "[x + {n} for x in {xs}]",
    "lowered": "[x - {n} for x in {xs}]",
    "scaled": "[x * {n} for x in {xs}]",
}


def right_line(prompt: str, _: object) -> str:
    """What a good sub-agent says, read from what it is shown."""
    name, xs, words = re.findall(r'def (\w+)\((\w+)\):\n    """(.*?)"""', prompt)[-1]
    number = re.search(r"\d", words)
    return "return " + RETURNS[name].format(xs=xs, n=number[0] if number else "")


@pytest.fixture
def codex() -> None:
    try:
        make_terminal_agent()
    except ConfigError as error:
        pytest.skip(str(error))


async def test_the_sub_agent_alone_is_trained_and_sees_what_is_demonstrated(codex: None) -> None:
    planner, agent = load_example("delegation", "planner"), load_example("delegation", "delegating_agent")
    (task,) = make_tasks()["train"][:1]
    rendering, store = load_rendering(resolve_model("calc")), InMemoryLightningStore()
    engine = ScriptedEngine(rendering, right_line)
    with planner.planning() as url:
        models = {agent.PLANNER: agl.Provider(base_url=url)}
        async with Gateway(store, engine, rendering, train_agents="^sub-agent", models=models) as gateway:
            runner = LitAgentRunner(agl.DummyTracer(), gateway=gateway)
            runner.init(agent.make_agent())
            runner.init_worker(0, store)
            done = await runner.step(task, resources={"llm": gateway.as_resource()}, mode=RolloutMode.TRAIN)
            runner.teardown()
    assert done.attempt.outcome is Outcome.OK, done.attempt.error
    spans = list(await store.query_spans(done.rollout_id))
    assert find_final_reward(spans) == 1.0
    (call,) = (await store.query_calls([done.rollout_id]))[done.rollout_id]
    assert (str(call.info.agent).partition("/")[0], call.info.trained) == ("sub-agent", True)
    assert prompt_ids(task) == call.prompt_ids.tolist()
    await store.close()


def prompt_ids(task: dict[str, Any]) -> list[int]:
    """What the small model is taught to answer."""
    planner, prompts = load_example("delegation", "planner"), load_example("terminal", "prompts")
    source = task["files"][task["module"]]
    wrong = next(name for name in re.findall(r"def (\w+)", source) if name in task_fault(task))
    tokenizer: Any = AutoTokenizer.from_pretrained(resolve_model("calc"))
    messages: Any = prompts.conversation(planner.function_of(source, wrong))
    return list(Qwen3Renderer(tokenizer).render_ids(messages, add_generation_prompt=True))


def task_fault(task: dict[str, Any]) -> set[str]:
    """The function that does not give what the visible tests say."""
    names: dict[str, Any] = {}
    exec(task["files"][task["module"]], names)
    return {name for name, given, value in task["hidden"] if names[name](given) != value}


@pytest.mark.slow
async def test_two_steps_of_it(codex: None, tmp_path: Path) -> None:
    """A model that was taught for three steps knows nothing; no rollout fails."""
    installed(tmp_path / "cache")
    make = "from agentlightning.trainer.example import load_example; load_example('tools', 'make_model').main()"
    command(tmp_path, "-c", make, "delegation", "--quick", "--out", "model", timeout=200)
    train = (
        "from agentlightning.trainer.example import load_example; load_example('delegation', 'train').train("
        "'model', tasks=4, val=2, steps=2, tasks_per_step=2, group_size=2, preflight='warn', run_dir='run')"
    )
    command(tmp_path, "-c", train, timeout=400)
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["step"] > 0]
    assert [row["failed"] for row in rows] == [0, 0]
