"""`agl serve`: the official client talks to a model, with and without a key."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from openai import AuthenticationError, OpenAI

KEY = "a-key"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, str]]:
    """The base URL, and the command that is printed to try it."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "AGL_API_KEY": KEY, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "agentlightning", "serve", "calc", "--port", "0"]
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
    done = subprocess.run(
        ["bash", "-c", served[1]], capture_output=True, text=True, env={**os.environ, "AGL_API_KEY": KEY}, check=True
    )
    (choice,) = json.loads(done.stdout)["choices"]
    asked = choice["message"]["tool_calls"][0]["function"]
    assert asked["name"] == "calc", "it answers as it was trained to"


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


def test_a_wrong_key_is_refused(url: str) -> None:
    with OpenAI(base_url=url, api_key="another", max_retries=0) as client, pytest.raises(AuthenticationError):
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
