"""What a first agent gets wrong, and the answer that mends it: on the shipped model, through the real gateway."""

from __future__ import annotations

import inspect
import logging
import os
import runpy
import time
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning.metrics import SilentConsole
from agentlightning.runner import blocking

TASK = {"question": "6 * 7", "answer": "42"}
HI: Any = [{"role": "user", "content": "hi"}]
MINE = Path(__file__).name


async def ask(llm: agl.LLM, messages: Any = HI, model: str | None = None, **client: Any) -> None:
    given = {"base_url": llm.endpoint, "api_key": llm.api_key, "max_retries": 0, **client}
    async with AsyncOpenAI(**given) as openai:
        await openai.chat.completions.create(model=model or llm.model, messages=messages, max_tokens=2)


async def another_address(task: Any, llm: agl.LLM) -> float:
    await ask(llm, base_url="http://127.0.0.1:9/v1")
    return 1.0


async def no_key(task: Any, llm: agl.LLM) -> float:
    await ask(llm, api_key=None)
    return 1.0


async def another_model(task: Any, llm: agl.LLM) -> float:
    await ask(llm, model="gpt-4o")
    return 1.0


async def the_path_twice(task: Any, llm: agl.LLM) -> float:
    await ask(llm, base_url=f"{llm.endpoint}/chat/completions")
    return 1.0


async def too_long(task: Any, llm: agl.LLM) -> float:
    await ask(llm, [{"role": "user", "content": "hi " * 2000}])
    return 1.0


async def a_dict(task: Any, llm: agl.LLM) -> Any:
    await ask(llm)
    return {"correct": 1.0, "format": 0.5}


async def words_for_a_reward(task: Any, llm: agl.LLM) -> Any:
    return "correct"


async def a_tuple(task: Any, llm: agl.LLM) -> Any:
    return 1.0, "because"


async def not_a_number(task: Any, llm: agl.LLM) -> float:
    return float("nan")


async def nothing(task: Any, llm: agl.LLM) -> None:
    await ask(llm)


def a_forgotten_await(task: Any, llm: agl.LLM) -> Any:
    return ask(llm)


async def a_field_that_is_not_there(task: Any, llm: agl.LLM) -> float:
    return float(task["anwser"] == "42")


async def a_list_of_messages(task: Any, llm: agl.LLM) -> Any:
    return [{"role": "user", "content": "hi"}]


async def a_list_of_numbers(task: Any, llm: agl.LLM) -> Any:
    return [1.0, 0.5]


async def a_number_in_words(task: Any, llm: agl.LLM) -> Any:
    return "1.0"


def a_generator(task: Any, llm: agl.LLM) -> Any:
    yield 1.0


def the_keyboard(task: Any, llm: agl.LLM) -> float:
    raise EOFError("EOF when reading a line")


def exits(task: Any, llm: agl.LLM) -> float:
    raise SystemExit(3)


@agl.rollout
async def every_agent(task: str, llm: agl.LLM) -> Any:
    """The one that the task names."""
    result = globals()[task](TASK, llm)
    return await result if inspect.isawaitable(result) and task != "a_forgotten_await" else result


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is said of each agent, on one model."""
    algorithm = agl.Baseline(model="calc", backend="inprocess", max_context=256)
    run_dir = tmp_path_factory.mktemp("first_day")
    with pytest.MonkeyPatch.context() as machine:
        machine.delenv("OPENAI_API_KEY", raising=False)
        agl.Trainer(algorithm=algorithm, run_dir=run_dir, console=SilentConsole()).fit(every_agent, list(EXPECTED))
    return {e.rollout.input: (e.attempt and e.attempt.error) or "nothing" for e in algorithm.episodes}


EXPECTED = {
    "another_address": ["Connection error", "talks to another address", "base_url=llm.endpoint", MINE],
    "no_key": ["No account is needed", "api_key=llm.api_key", MINE],
    "another_model": ["'gpt-4o' does not exist here", "model=llm.model"],
    "the_path_twice": ["the client itself adds /chat/completions"],
    "too_long": ["prompt is too long", "max_context of the algorithm"],
    "a_dict": ["returned a dict", "Return the number that trains", "primary_key"],
    "words_for_a_reward": ["must be a number, not str: 'correct'"],
    "a_tuple": ["must be a number, not tuple", "Return the number alone"],
    "a_number_in_words": ["Return float(…) of it"],
    "a_generator": ["The function has `yield`"],
    "the_keyboard": ["in place of input()"],
    "not_a_number": ["must be a finite number"],
    "nothing": ["Return a number from the agent", "emit_reward"],
    "a_forgotten_await": ["returned a coroutine", "await it inside"],
    "a_field_that_is_not_there": ["KeyError: 'anwser'", MINE, '"anwser"'],
    "a_list_of_messages": ["Return the reward: what was said is recorded already."],
    "a_list_of_numbers": ["a list that holds something else than spans or triplets", "Return one number"],
    "exits": ["SystemExit(3)"],
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXPECTED)
def test_the_answer_mends_it(answers: dict[str, str], name: str) -> None:
    for words in EXPECTED[name]:
        assert words in answers[name], answers[name]
    assert "/site-packages/" not in answers[name], "the user's own lines are enough"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_agent_that_changes_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The run's own paths are relative to where it began, as are those of other rollouts."""
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def sync_agent(task: Any) -> float:
        os.chdir(elsewhere)
        return 1.0

    async def async_agent(task: Any) -> float:
        return sync_agent(task)

    algorithm = agl.Baseline()
    trainer = agl.Trainer(algorithm=algorithm, run_dir="run", console=SilentConsole())
    trainer.fit(sync_agent if kind == "sync" else async_agent, [1, 2])
    assert Path.cwd() == tmp_path
    assert list(elsewhere.iterdir()) == []
    assert [e.reward for e in algorithm.episodes] == [1.0, 1.0]


def test_code_that_blocks_the_loop_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in {"ASK_SECONDS": 0.05, "BLOCKED_SECONDS": 0.1, "SAME_SECONDS": 0.05}.items():
        monkeypatch.setattr(blocking, name, seconds)  # so that it is seen ten times and more, where five are needed

    async def blocks(task: Any) -> float:
        time.sleep(1.5)  # noqa: ASYNC251 - the mistake itself
        return 1.0

    with caplog.at_level(logging.WARNING):
        agl.Trainer(run_dir=tmp_path, console=SilentConsole()).dev(blocks, [1, 2])
    (said,) = [r.getMessage() for r in caplog.records if "blocks its event loop" in r.getMessage()]
    for words in (MINE, "time.sleep(1.5)", "plain `def`"):
        assert words in said


def test_many_agents_that_each_take_a_moment_are_not_blamed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def makes_a_client(task: Any) -> float:
        time.sleep(0.05)  # noqa: ASYNC251 - as long as a client takes to make, on a busy machine
        return 1.0

    with caplog.at_level(logging.WARNING):
        agl.Trainer(run_dir=tmp_path, console=SilentConsole()).dev(makes_a_client, list(range(64)))
    assert "blocks its event loop" not in caplog.text


def test_a_library_that_computes_below_an_await_is_nobodys_mistake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = tmp_path / "site-packages" / "slow_library.py"
    library.parent.mkdir()
    library.write_text("import time\n\n\nasync def slow():\n    time.sleep(3)\n")
    slow = runpy.run_path(str(library))["slow"]

    async def awaits(task: Any) -> float:
        await slow()
        return 1.0

    with caplog.at_level(logging.WARNING):
        agl.Trainer(run_dir=tmp_path / "run", console=SilentConsole()).dev(awaits, [1])
    assert "blocks its event loop" not in caplog.text
