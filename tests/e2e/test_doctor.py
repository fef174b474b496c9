"""`agl doctor` on real agents and the real small model: broken ones are named, a good one is not accused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import agentlightning
from agentlightning.algorithm.episode import Episode
from agentlightning.cli.doctor import LATER, at_a_time, longer_than_others
from agentlightning.trainer.example import load_example
from agentlightning.types import Attempt, Rollout

CALC = Path(agentlightning.__file__).parent.parent / "examples" / "calc" / "calc_agent.py"

AGENTS = """
import asyncio, time, agentlightning as agl

@agl.rollout
def silent(task, llm):
    return float(task % 2)

@agl.rollout
def elsewhere(task, llm):
    from openai import OpenAI
    try:
        client = OpenAI(base_url="http://127.0.0.1:9/v1", api_key="sk-x", max_retries=0)
        client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "hi"}])
    except Exception:
        return float(task % 2)

@agl.rollout
def forgets(task, llm):
    from openai import OpenAI
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "2 + 2?"}])

@agl.rollout
async def hangs(task, llm):
    await asyncio.sleep(999)
    return float(task % 2)

@agl.rollout
async def blocks(task, llm):
    time.sleep(1.0)
    return float(task % 2)

said = []

@agl.rollout
async def remembers(task, llm):
    from openai import AsyncOpenAI
    chat = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key).chat.completions
    asked = [*said, {"role": "user", "content": f"What is {task} + 2?"}]
    answer = await chat.create(model=llm.model, messages=asked, max_tokens=24)
    said.extend([asked[-1], {"role": "assistant", "content": answer.choices[0].message.content or "none"}])
    return float(len(answer.choices[0].message.content or "") % 2)
"""


def doctor(cwd: Path, agent: str, *more: str) -> dict[str, object]:
    command = [sys.executable, "-m", "agentlightning", "doctor", "--agent", agent, "--tasks", "tasks.jsonl", "--json"]
    done = subprocess.run([*command, *more], cwd=cwd, capture_output=True, text=True, check=False, timeout=110)
    assert done.stdout, done.stderr
    return {**json.loads(done.stdout), "exit": done.returncode}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "code", "words"),
    [
        ("silent", "never_called", "no call arrived"),
        ("elsewhere", "calls_not_captured", "http://127.0.0.1:9/v1"),
        ("forgets", "no_reward", "without a reward"),
        ("blocks", "blocks_the_loop", "time.sleep(1.0)"),
        ("hangs", "too_slow", "claimed, nothing recorded yet"),
    ],
)
def test_broken_agents_are_named(tmp_path: Path, agent: str, code: str, words: str) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "tasks.jsonl").write_text("1\n2\n3\n4\n")
    found = doctor(tmp_path, f"agents.py:{agent}")
    by_code = {f["code"]: f for f in found["findings"]}  # type: ignore[attr-defined]
    assert words in by_code[code]["words"]
    assert by_code[code]["fix"]
    assert found["exit"] == 1


@pytest.mark.slow
def test_a_history_that_all_rollouts_share_is_named(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "tasks.jsonl").write_text("1\n2\n3\n4\n")
    found = doctor(tmp_path, "agents.py:remembers")
    assert "history_kept" in {f["code"] for f in found["findings"]}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("rollouts", "concurrency"), [(1, 16), (2, 16), (8, 16), (16, 16), (16, 4), (100, 64)])
def test_some_rollouts_come_after_others(rollouts: int, concurrency: int) -> None:
    together = at_a_time(rollouts, concurrency)
    assert 1 <= together <= concurrency
    assert rollouts < LATER or rollouts - together >= rollouts // LATER


HANGS = """
import asyncio
import agentlightning as agl
from openai import AsyncOpenAI

@agl.rollout
async def hangs(task, llm: agl.LLM) -> float:
    if task == 1:
        await asyncio.sleep(1000)
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        asked = [{"role": "user", "content": f"What is {task} + 2?"}]
        answer = await client.chat.completions.create(model=llm.model, messages=asked, max_tokens=8)
    return float(len(answer.choices[0].message.content or "") % 3)
"""


@pytest.mark.slow
def test_a_few_rollouts_that_hang_are_no_late_ones(tmp_path: Path) -> None:
    """One task of six has no end: too few for a doctor that counts alone, since a third of all begins later."""
    (tmp_path / "agents.py").write_text(HANGS)
    (tmp_path / "tasks.jsonl").write_text("1\n2\n3\n4\n5\n6\n")
    found = doctor(tmp_path, "agents.py:hangs", "--seconds", "15")
    assert "too_slow" in {f["code"] for f in found["findings"]}  # type: ignore[attr-defined]


def test_a_rollout_that_took_longer_than_all_that_ended_is_not_only_late() -> None:
    done = [episode(seconds=2.0), episode(seconds=3.0)]
    late, hanging, unseen = episode(seconds=1.0), episode(seconds=9.0), episode(seconds=None)
    assert longer_than_others([late, hanging, unseen], done) == [hanging]
    assert longer_than_others([late], []) == [late]


def episode(*, seconds: float | None) -> Episode:
    attempt = Attempt(rollout_id="r", attempt_id="a", sequence_id=1, start_time=100.0)
    ended = None if seconds is None else attempt.model_copy(update={"end_time": 100.0 + seconds})
    return Episode(Rollout(rollout_id="r", input=1), ended, None, [])


@pytest.mark.slow
def test_the_example_is_not_accused(tmp_path: Path) -> None:
    tasks = load_example("calc", "recipe").test_tasks()[:8]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    found = doctor(tmp_path, f"{CALC}:calc_agent", "--limit", "8", "--seconds", "60")
    assert [f["severity"] for f in found["findings"] if f["severity"] == "problem"] == []  # type: ignore[attr-defined]
    assert found["exit"] == 0
