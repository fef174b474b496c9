"""Ctrl-C ends every command with status 130, in words, and advises only what works."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentlightning.backend.embedded.inbox import Inbox
from agentlightning.backend.embedded.protocol import Abort, StopProcess, ToChild, frame

from .day import agl

SLOW_AGENT = """
import asyncio
from pathlib import Path

import agentlightning as agl


@agl.rollout
async def agent(task, llm):
    Path("began").touch()
    await asyncio.sleep(600)
    return 1.0
"""


QUICK_AGENT = """
import agentlightning as agl
from openai import OpenAI


@agl.rollout
def agent(task, llm):
    messages = [{"role": "user", "content": "What is 1 + 2?"}]
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    answer = client.chat.completions.create(model=llm.model, messages=messages, max_tokens=8)
    return float(len(answer.choices[0].message.content or "") % 3)
"""


def begun(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "agent.py").write_text(SLOW_AGENT)
    (folder / "tasks.jsonl").write_text("1\n2\n")
    return subprocess.Popen(
        [sys.executable, "-m", "agentlightning", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
    )


def interrupted(folder: Path, *arguments: str) -> tuple[int, str]:
    """Ctrl-C as soon as an agent runs: the exit status, and what was printed."""
    process = begun(folder, *arguments)
    deadline = time.monotonic() + 120
    while not (folder / "began").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    return process.returncode, printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words", "resumes"),
    [
        pytest.param(
            ["eval", "calc", "--agent", "agent.py:agent", "--tasks", "tasks.jsonl"],
            "nothing to compare",
            False,
            marks=pytest.mark.slow,
        ),
        (["train", "--agent", "agent.py:agent", "--tasks", "tasks.jsonl"], "Go on with the same command", True),
        pytest.param(
            ["run", "--agent", "agent.py:agent", "--tasks", "tasks.jsonl", "--model", "calc"],
            "Stopped.",
            False,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["doctor", "--agent", "agent.py:agent", "--tasks", "tasks.jsonl"], "", False, marks=pytest.mark.slow
        ),
    ],
    ids=["eval", "train", "run", "doctor"],
)
def test_before_there_is_anything(tmp_path: Path, arguments: list[str], words: str, resumes: bool) -> None:
    status, printed = interrupted(tmp_path, *arguments)
    assert status == 130, printed
    assert words in printed
    assert "Traceback" not in printed
    assert ("--resume" in printed) is resumes, "a run is saved before its first step"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_advised_before_the_first_step_works(tmp_path: Path) -> None:
    """The same command and what was printed behind it, when the agent is no longer slow."""
    command = ("train", "--agent", "agent.py:agent", "--tasks", "tasks.jsonl", "--set", "steps=1", "--run-dir", "run")
    status, printed = interrupted(tmp_path, *command)
    assert status == 130
    (advised,) = re.findall(r"--resume \S+", printed)
    (tmp_path / "agent.py").write_text(QUICK_AGENT)
    done = agl(tmp_path, *command[:-2], *advised.split())
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert "Next:" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_runner(tmp_path: Path) -> None:
    store = begun(tmp_path, "store", "--path", "store.db", "--port", "0")
    assert store.stdout is not None
    url = next(found[0] for line in store.stdout if (found := re.findall(r"at (http://\S+)", line)))
    runner = begun(tmp_path, "runner", "--server", url, "--agent", "agent.py:agent")
    assert runner.stdout is not None
    told = []
    for line in runner.stdout:
        told.append(line)
        if "No rollout waits there now" in line:
            break
    runner.send_signal(signal.SIGINT)
    told.append(runner.communicate(timeout=60)[0])
    assert runner.returncode == 130, "".join(told)
    assert "Running rollouts" in "".join(told)
    assert "Stopped." in told[-1]
    store.send_signal(signal.SIGINT)
    printed, _ = store.communicate(timeout=60)
    assert store.returncode == 130, printed
    assert "Traceback" not in "".join([*told, printed])


# ---- a process that ends without a word ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)"])
@pytest.mark.quick_with("os._exit(0)")
def test_an_agent_that_ends_the_whole_process(tmp_path: Path, end: str) -> None:
    """The model process, which is left, says it where the run was started."""
    (tmp_path / "train.py").write_text(
        "import os\nimport agentlightning as agl\n\n\n"
        f"@agl.rollout\ndef agent(task, llm):\n    {end}\n\n\n"
        "agl.Trainer(algorithm=agl.GRPO(model='calc', steps=1)).fit(agent, [1, 2])\n"
    )
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert "The main process ended without a word" in done.stderr
    assert "agl why RUN" in done.stderr


@pytest.mark.parametrize(
    ("sent", "says"),
    [([], True), ([Abort(1)], True), ([StopProcess()], False), ([Abort(1), StopProcess()], False)],
)
def test_only_an_end_without_a_word_is_told(sent: list[ToChild], says: bool) -> None:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    inbox = Inbox(theirs, in_a_process=False, terminal=[write])
    for message in sent:
        ours.sendall(frame(message))
    ours.close()
    while inbox.wait(timeout=10) != StopProcess():
        pass
    os.close(write)
    with os.fdopen(read) as terminal, theirs:
        assert ("ended without a word" in terminal.read()) is says


STUBBORN_AGENT = SLOW_AGENT.replace(
    "    await asyncio.sleep(600)\n",
    "    try:\n        await asyncio.sleep(600)\n    finally:\n        await asyncio.sleep(600)\n",
)


@pytest.mark.slow
def test_a_second_ctrl_c_in_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"{STUBBORN_AGENT}\nagl.Trainer(algorithm=agl.GRPO(model='calc', steps=1), run_dir='run').fit(agent, [1, 2])\n"
    )
    process = subprocess.Popen([sys.executable, "train.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "began").exists():
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    complained = process.communicate(timeout=60)[1]
    assert process.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in complained
    assert "Stopped at once. To go on: Trainer(resume='run')" in complained
