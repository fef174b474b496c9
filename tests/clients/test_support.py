"""`examples/support` with the real tau2, before an engine that solves cases as tau2 expects, or does nothing: in all
four domains tau2's evaluator gives 1 and 0, every token is the one that was sampled, calls go on from the tokens of the
one before, and what the small model is taught is what the agent says, token by token.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from transformers import AutoTokenizer

import agentlightning as agl
from agentlightning.gateway import Frozen, Gateway
from agentlightning.models import resolve_model
from agentlightning.rendering import load_rendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Outcome
from agentlightning.types.reward import find_final_reward
from examples.support.cases import KINDS, make_case
from examples.support.demonstrations import SKILL, shown
from examples.support.prompts import call
from examples.support.script import Script
from examples.tools.make_model import make_renderer, row_of
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
    """What an agent says that does what tau2 expects: a turn for each action, then what it has to tell."""
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


@asynccontextmanager
async def served(answer: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    """An endpoint for chat completions on this machine."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def simulator(opening: str, asked: list[Any]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A language model that plays the user: it says the opening and then that it is done. Keeps what it was asked."""

    async def answer(request: web.Request) -> web.Response:
        asked.append(body := await request.json())
        text = opening if len(asked) == 1 else "###STOP###"
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"]}
            | {"choices": [choice], "usage": usage}
        )

    return answer


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


async def test_what_the_small_model_is_taught_is_what_the_agent_says_and_solves_the_cases(world: World) -> None:
    """A case of each kind, worked on as in a demonstration in which all is well: every token is the same, so the tools
    of the miniature answer as tau2's, and its scripted user speaks as in tau2.
    """
    installed()
    rng, tokenizer = random.Random(0), AutoTokenizer.from_pretrained(resolve_model("calc"))
    made = [make_case(rng, kind) for kind in KINDS for _ in range(2)]
    told = [shown(case, rng, dict.fromkeys(SKILL, 1.0)) for case in made]
    tasks = [{"domain": "mock", "task": case.as_task(str(n))} for n, case in enumerate(made)]

    def say(prompt: str) -> str:
        taught = next(one for one in told if f"user\n{one.messages[-1]['content']}<|im_end|>" in prompt)
        return taught.turns[prompt.count(TURN) - 2]

    done = await run(world, tasks, say)
    assert {r.attempt.outcome for r in done.rollouts} == {Outcome.OK}, {r.attempt.error for r in done.rollouts}
    assert [find_final_reward(done.spans[r.rollout_id]) for r in done.rollouts] == [1.0] * len(tasks)
    for rollout, one in zip(done.rollouts, told, strict=True):
        last = done.calls[rollout.rollout_id][-1]
        said = [*last.prompt_ids.tolist(), *last.response_ids.tolist()]
        assert said == row_of(one, tokenizer, make_renderer(tokenizer))[0]
    idle = await run(world, tasks, lambda prompt: "Done.")
    assert [find_final_reward(idle.spans[r.rollout_id]) for r in idle.rollouts] == [0.0] * len(tasks)


@pytest.mark.parametrize(
    "said", ["", "Which one?", '<tool_call>\n{"name": "get_users", "arguments": []}\n</tool_call>']
)
async def test_what_a_model_says_to_no_end_earns_nothing(world: World, said: str) -> None:
    """An empty message, a question that is asked for ever, arguments that are none: no failure of the rollout."""
    installed()
    rng = random.Random(0)
    tasks = [{"domain": "mock", "task": make_case(rng, "finish").as_task("0")}]
    done = await run(world, tasks, lambda prompt: said)
    assert [r.attempt.outcome for r in done.rollouts] == [Outcome.OK], done.rollouts[0].attempt.error
    assert find_final_reward(done.spans[done.rollouts[0].rollout_id]) == 0.0


async def test_the_user_can_be_a_model_behind_an_endpoint(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """tau2's own simulator, whose calls go elsewhere: they are neither recorded nor trained."""
    installed()
    case = make_case(random.Random(0), "create")
    task = {"domain": "mock", "task": case.as_task("0")}
    opening = Script(case.reason).opening()
    asked: list[Any] = []

    async with served(simulator(opening, asked)) as url:
        monkeypatch.setenv("SUPPORT_USER_MODEL", "openai/simulator")
        monkeypatch.setenv("SUPPORT_USER_BASE_URL", url)
        monkeypatch.setenv("SUPPORT_USER_API_KEY", "secret")
        told = shown(case, random.Random(0), dict.fromkeys(SKILL, 1.0))
        done = await run(world, [task], lambda prompt: told.turns[prompt.count(TURN) - 2])
    assert [r.attempt.outcome for r in done.rollouts] == [Outcome.OK], done.rollouts[0].attempt.error
    assert find_final_reward(done.spans[done.rollouts[0].rollout_id]) == 1.0
    assert [body["model"] for body in asked] == ["simulator", "simulator"]
    assert case.reason in asked[0]["messages"][0]["content"], "the scenario"
    assert len(done.all_calls()) == done.exact() == len(told.turns)


async def test_the_user_can_be_a_frozen_model_of_the_same_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """tau2's own simulator asks the gateway for another model by name: that is recorded, and not trained."""
    installed()
    from examples.support.support_agent import support_agent

    for name, value in {"MODEL": "openai/user", "BASE_URL": agl.GATEWAY_URL, "API_KEY": "none"}.items():
        monkeypatch.setenv(f"SUPPORT_USER_{name}", value)
    case = make_case(random.Random(0), "create")
    told = shown(case, random.Random(0), dict.fromkeys(SKILL, 1.0))
    lines = iter([Script(case.reason).opening(), "###STOP###"])
    user = SayingEngine(world.process, lambda _: next(lines), max_context=65_536)
    assistant = SayingEngine(world.process, lambda prompt: told.turns[prompt.count(TURN) - 2], max_context=65_536)
    store, rendering = InMemoryLightningStore(), load_rendering(resolve_model("calc"))
    gateway = Gateway(store, engine := WitnessedEngine(assistant), rendering, models={"user": Frozen(user, rendering)})
    done = await carried_out(support_agent, [{"domain": "mock", "task": case.as_task("0")}], engine, store, gateway)
    assert [r.attempt.outcome for r in done.rollouts] == [Outcome.OK], done.rollouts[0].attempt.error
    assert find_final_reward(done.spans[done.rollouts[0].rollout_id]) == 1.0
    called = [(call.info.policy, call.info.trained) for call in done.all_calls()]
    assert called.count(("user", False)) == 2
    assert [trained for policy, trained in called if policy != "user"] == [True] * len(told.turns)
