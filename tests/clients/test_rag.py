"""`examples/rag` with the real Agents SDK and its MCP server, before an engine that searches as the question wants:
documents come as tool results, every call goes on from the tokens of the one before, every token is the sampled one,
and what the small model is taught is what the agent says, token by token.
"""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from renderers import Qwen3Renderer
from transformers import AutoTokenizer

from agentlightning.gateway import Gateway
from agentlightning.models import resolve_model
from agentlightning.rendering import load_rendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Outcome
from agentlightning.types.reward import find_final_reward
from examples.rag.bm25 import Library
from examples.rag.corpus import make_documents, make_questions, make_world, write_data
from examples.rag.demonstrations import call as call_of, tagged
from examples.rag.prompts import SEARCH_TOOL, conversation
from examples.tools.demonstration import Demonstration
from examples.tools.make_model import row_of
from tests.clients.conftest import SayingEngine, WitnessedEngine, World, carried_out

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("default"),  # other people's packages
]

TASKS = 10


def _say(prompt: str) -> str:
    """Searches for what it found last, and answers. It knows only what stands in the documents that it was given."""
    firm = re.findall(r"the founder of (\w+ & \w+)", prompt)[0]
    founder = re.findall(rf"{firm} makes \w+\. It was founded by (\w+ van \w+)\.", prompt)
    town = re.findall(rf"{founder[0]} was born in (\w+)\.", prompt) if founder else []
    if town:
        return f"<answer>{town[0]}</answer>"
    query = founder[0] if founder else firm
    return f'<tool_call>\n{{"name": "search", "arguments": {json.dumps({"query": query})}}}\n</tool_call>'


async def test_documents_are_tool_results_and_calls_go_on_from_each_other(world: World, tmp_path: Path) -> None:
    pytest.importorskip("agents.mcp", reason="the Agents SDK is not installed here: examples/rag/requirements.txt")
    from examples.rag.rag_agent import rag_agent

    tasks = [t for t in write_data(tmp_path)["train"] if t["question"].startswith("Where was the founder of")][:TASKS]
    engine = WitnessedEngine(SayingEngine(world.process, _say))
    store = InMemoryLightningStore()
    gateway = Gateway(store, engine, load_rendering(resolve_model("calc")))
    run = await carried_out(rag_agent, tasks, engine, store, gateway)
    assert {r.attempt.outcome for r in run.rollouts} == {Outcome.OK}, {r.attempt.error for r in run.rollouts}
    assert [find_final_reward(run.spans[r.rollout_id]) for r in run.rollouts] == [1.0] * TASKS
    assert {call.info.agent for call in run.all_calls()} == {"researcher"}
    assert run.exact() == len(run.all_calls()) == 3 * TASKS
    assert run.continued() == 2 * TASKS
    assert {task["answer"] for task in tasks} <= set(make_world().births.values())
    for rollout in run.rollouts:
        last = run.calls[rollout.rollout_id][-1]
        said = [*last.prompt_ids.tolist(), *last.response_ids.tolist()]
        assert said == _taught(rollout.input["question"]), "what the small model is taught"


async def test_a_server_that_died_fails_the_rollouts(world: World, tmp_path: Path) -> None:
    """That is no answer of the model's, so it is not worth 0."""
    pytest.importorskip("agents.mcp", reason="the Agents SDK is not installed here: examples/rag/requirements.txt")
    from examples.rag.rag_agent import rag_agent

    tasks = [t for t in write_data(tmp_path)["train"] if t["question"].startswith("Where was the founder of")][:2]
    outcomes = []
    for _ in range(2):
        engine = WitnessedEngine(SayingEngine(world.process, _say))
        store = InMemoryLightningStore()
        gateway = Gateway(store, engine, load_rendering(resolve_model("calc")))
        run = await carried_out(rag_agent, tasks, engine, store, gateway)
        outcomes.append({r.attempt.outcome for r in run.rollouts})
        _kill(tasks[0]["corpus"])
    assert outcomes == [{Outcome.OK}, {Outcome.AGENT_ERROR}]


def _kill(argument: str) -> None:
    """End the processes whose command holds this."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is over
            if argument.encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def _taught(text: str) -> list[int]:
    """The tokens of the demonstration in which everything is done well."""
    made, tokenizer = make_world(), AutoTokenizer.from_pretrained(resolve_model("calc"))
    library = Library(make_documents(made))
    names = next(question.names for question in make_questions(made) if question.text == text)
    turns = (*map(call_of, names[:-1]), tagged(names[-1]))
    results = tuple(map(library.search, names[:-1]))
    shown = Demonstration(conversation(text), turns, results, [SEARCH_TOOL])
    return row_of(shown, tokenizer, Qwen3Renderer(tokenizer))[0]
