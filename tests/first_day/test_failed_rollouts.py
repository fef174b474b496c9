"""What a training says when rollouts fail: the error, what it probably comes from, and the agent's own line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncStream, Stream
from openai.types.chat.chat_completion_chunk import Choice

from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.rollout_verdicts import most_fail
from agentlightning.errors import ConfigError
from agentlightning.runner.endings import describe
from agentlightning.trainer.example import load_agent
from agentlightning.types import Attempt, Outcome, Rollout
from tests.first_day.day import agl, said

Task = dict[str, str]
TASK = {"prompt": "1 + 1"}


def reads_a_chunk_as_an_answer(task: Task) -> Any:
    part: Any = Choice.model_construct(delta=None)
    return part.message.content


def reads_an_async_stream_without_async(task: Task) -> Any:
    stream: Any = object.__new__(AsyncStream)
    return list(stream)


def reads_an_async_generator_without_async(task: Task) -> Any:
    async def parts() -> Any:
        yield "a part"

    return list(parts())  # pyright: ignore


def reads_a_stream_with_async(task: Task) -> Any:
    stream: Any = object.__new__(Stream)

    async def read() -> list[Any]:
        return [part async for part in stream]

    return asyncio.run(read())


def reads_a_field_that_is_not_there(task: Task) -> Any:
    return task["question"]


def reads_a_task_as_an_object(task: Any) -> Any:
    return task.prompt


def waits_too_short(task: Task) -> Any:
    return asyncio.run(asyncio.wait_for(asyncio.sleep(60), 0.001))


def asserts_without_words(task: Task) -> Any:
    raise AssertionError


def reads_the_environment(task: Task) -> Any:
    raise KeyError("OPENAI_BASE_URL")


def fails_in_many_lines(task: Task) -> Any:
    return json.loads("{\n" * 500)


def runs_a_loop_in_a_loop(task: Task) -> Any:
    async def agent() -> None:
        waiting = asyncio.sleep(0)
        try:
            asyncio.run(waiting)
        finally:
            waiting.close()

    return asyncio.run(agent())


MENDED_BY: dict[Callable[[Any], Any], str] = {
    reads_a_chunk_as_an_answer: "chunk.choices[0].delta.content",
    reads_an_async_stream_without_async: "async for chunk in stream",
    reads_an_async_generator_without_async: "async for chunk in stream",
    reads_a_stream_with_async: "a plain  for chunk in stream",
    reads_a_field_that_is_not_there: "it has prompt",
    reads_a_task_as_an_object: 'task["question"]',
    waits_too_short: "TimeoutError. Line",
    asserts_without_words: "AssertionError. Line",
    reads_the_environment: "api_key=llm.api_key",
    fails_in_many_lines: "JSONDecodeError",
    runs_a_loop_in_a_loop: "await the coroutine",
}


def said_of(error: str, outcome: Outcome = Outcome.AGENT_ERROR) -> str:
    rollout = Rollout(rollout_id="ro-1", input=TASK)
    attempt = Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0.0, outcome=outcome, error=error)
    return str(most_fail([Episode(rollout, attempt, None, [])], 1))


@pytest.mark.parametrize("agent", MENDED_BY)
def test_the_cause_and_the_line_are_said_with_the_error(agent: Callable[[Any], Any]) -> None:
    with pytest.raises(BaseException) as raised:  # noqa: PT011 - each raises its own
        agent(TASK)
    words = said_of(describe(raised.value, TASK))
    assert MENDED_BY[agent] in words
    assert f"of {__file__}: `" in words, "the agent's own line"
    assert len(words) < 900


@pytest.mark.parametrize("error", ["The program ended with exit code 1.\nno such file", "stopped", ""])
def test_what_is_no_exception_is_said_as_before(error: str) -> None:
    words = said_of(error)
    assert (error.partition("\n")[0] or "no message") in words
    assert "Line" not in words
    assert ".." not in words


@pytest.mark.parametrize(
    "block", ['if __name__ == "__main__":', "def main():", "class Agents:", "for _ in range(0):", "if False:"]
)
@pytest.mark.parametrize("what", ["def agent(task): return 1.0", "async def agent(task): return 1.0", "agent = len"])
def test_an_agent_inside_a_block_is_found(tmp_path: Path, block: str, what: str) -> None:
    (tmp_path / "a.py").write_text(f"{block}\n    {what}\n")
    with pytest.raises(ConfigError, match=r"no 'agent' at its top level. Line 2 defines it, indented"):
        load_agent(f"{tmp_path}/a.py:agent")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("async def rollout(self, task): return 1.0", "class MyAgent(agl.LitAgent)"),
        ("x = 1", "class MyAgent(agl.LitAgent)"),
        ("def __call__(self, task): return 1.0", "an instance of it: Mine(…)"),
    ],
)
def test_a_class_that_is_no_agent(tmp_path: Path, body: str, words: str) -> None:
    (tmp_path / "a.py").write_text(f"class Mine:\n    {body}\n")
    with pytest.raises(ConfigError) as raised:
        load_agent(f"{tmp_path}/a.py:Mine")
    assert words in str(raised.value)


def test_paths_of_windows(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.py").write_text("def agent(task): return 1.0\n")
    (tmp_path / "tasks.jsonl").write_text('"a"\n')
    for path in (r".\mine\a.py", r"mine\a.py"):
        done = agl(tmp_path, "train", "--agent", f"{path}:agent", "--tasks", "tasks.jsonl")
        said(done, "Folders stand behind / here:", path.replace("\\", "/"))
    done = agl(tmp_path, "train", "--agent", "mine/a.py:agent", "--tasks", r".\tasks.jsonl")
    said(done, "Folders stand behind / here: ./tasks.jsonl")


@pytest.mark.parametrize("pattern", ["part-*.jsonl", "part-?.jsonl", "**/part-1.jsonl"])
def test_a_pattern_is_no_file(tmp_path: Path, pattern: str) -> None:
    for number in range(2):
        (tmp_path / f"part-{number}.jsonl").write_text('"a"\n')
    (tmp_path / "a.py").write_text("def agent(task): return 1.0\n")
    done = agl(tmp_path, "train", "--agent", "a.py:agent", "--tasks", pattern)
    said(done, "Tasks are read from one file, such as part-", f"cat {pattern} > all.jsonl")


def test_a_stream_that_is_not_read_to_its_end_is_no_news(capfd: pytest.CaptureFixture[str]) -> None:
    from agentlightning.runner.executor import AgentLoop

    async def parts() -> Any:
        try:
            yield 1
        finally:
            raise RuntimeError("cannot be closed")

    async def leaves(stream: Any) -> int:
        return await anext(stream)

    loop, stream = AgentLoop(), parts()
    coroutine: Coroutine[Any, Any, int] = leaves(stream)
    assert asyncio.run(loop.run(coroutine)) == 1
    asyncio.run(loop.run(loop._cancel_all()))  # pyright: ignore[reportPrivateUsage]
    assert "closing of asynchronous generator" not in capfd.readouterr().err


def test_tuning_prompts_says_it_too(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def agent(task, llm):\n    return task.question\n")
    (tmp_path / "tasks.jsonl").write_text('{"question": "a"}\n{"question": "b"}\n')
    work = ("--agent", "a.py:agent", "--tasks", "tasks.jsonl", "--endpoint", "http://127.0.0.1:9/v1")
    limits = ("--endpoint-model", "m", "--api-key", "k", "--demonstrations", "1", "--budget-rollouts", "8")
    said(agl(tmp_path, "optimize", *work, *limits), 'brackets: task["question"]', "Line 2 of", "`return task.question`")
