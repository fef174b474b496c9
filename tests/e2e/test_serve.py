"""`agl serve`: the official client talks to a model, with and without a key."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import AuthenticationError, OpenAI

from agentlightning.cli.serve import model_names

KEY = "a-key"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, str]]:
    """The base URL, and the command that is printed to try it."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "AGL_API_KEY": KEY, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "agentlightning", "serve", "calc", "--port", "0", "--name", "sums"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    with process.stdout:
        found = next(m for line in process.stdout if (m := re.search(r"at (http://\S+/v1)", line)))
        yield found[1], next(line for line in process.stdout if "curl" in line)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.wait(timeout=30) == 130, "as shells count Ctrl-C"
    assert "Stopped." in rest


@pytest.fixture
def url(served: tuple[str, str]) -> str:
    return served[0]


def test_the_printed_command_works_when_it_is_pasted(served: tuple[str, str]) -> None:
    environment = {**os.environ, "AGL_API_KEY": KEY}
    tools: list[str] = []
    for _ in range(10):  # it samples, and one answer in four is a guess without the tool
        done = subprocess.run(["bash", "-c", served[1]], capture_output=True, text=True, env=environment, check=True)
        (choice,) = json.loads(done.stdout)["choices"]
        tools += [call["function"]["name"] for call in choice["message"].get("tool_calls", [])]
    assert set(tools) == {"calc"}, "it answers as it was trained to"


def test_a_chat_with_a_tool(url: str) -> None:
    tool = {"name": "calc", "description": "One operation on two numbers.", "parameters": {"type": "object"}}
    with OpenAI(base_url=url, api_key=KEY) as client:
        for stream in (False, True):
            answer = client.chat.completions.create(  # pyright: ignore[reportCallIssue]
                model="policy",
                messages=[{"role": "user", "content": "What is 12 + 30?"}],
                tools=[{"type": "function", "function": tool}],  # pyright: ignore[reportArgumentType]
                max_tokens=40,
                stream=stream,
            )
            if stream:
                assert list(answer)[-1].choices[0].finish_reason in ("stop", "length", "tool_calls")  # pyright: ignore
            else:
                assert answer.usage.completion_tokens > 0  # pyright: ignore


def test_it_lists_its_names_and_answers_to_any(url: str) -> None:
    with OpenAI(base_url=url, api_key=KEY) as client:
        assert {"sums", "calc", "policy"} <= {model.id for model in client.models.list()}
        for name in ("sums", "calc", "gpt-5-mini", "runs/mail"):
            answer = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "hi"}], max_tokens=2
            )
            assert answer.model == name


@pytest.mark.parametrize(
    ("typed", "first"),
    [
        ("calc", "calc"),
        ("runs/mail", "mail"),
        ("runs/mail/checkpoints/step-000010", "mail"),
        ("/srv/models/small", "small"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
    ],
)
def test_a_model_is_called_by_what_people_know_of_it(
    typed: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mail" / "checkpoints" / "step-000010").mkdir(parents=True)
    names = model_names(typed)
    assert names[0] == first
    assert not any(Path(name).is_absolute() for name in names)
    assert model_names(typed, "own")[0] == "own"


def test_a_wrong_key_is_refused(url: str) -> None:
    with OpenAI(base_url=url, api_key="another", max_retries=0) as client, pytest.raises(AuthenticationError):
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])


@pytest.mark.slow
def test_a_model_process_that_dies_is_started_again(url: str) -> None:
    """Killed, it is there again; calls until then are refused with 503, which clients try again."""
    servers = [child for parent in _children(os.getpid()) for child in _children(parent)]
    (killed,) = [pid for pid in servers if b"agentlightning.backend.embedded" in _command(pid)]
    os.kill(killed, signal.SIGKILL)
    reasons: list[str] = []
    deadline = time.monotonic() + 90
    with httpx.Client(timeout=60) as client, OpenAI(base_url=url, api_key=KEY, max_retries=0) as calls:
        while time.monotonic() < deadline:
            health = client.get(url.removesuffix("/v1") + "/health")
            if health.status_code == 503:
                reasons.append(health.json()["reason"])
            elif reasons:
                break
            time.sleep(0.02)
        assert "SIGKILL" in reasons[0]
        answer = calls.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "hi"}], max_tokens=4
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
