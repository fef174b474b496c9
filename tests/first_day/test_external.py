"""An agent on somebody else's model: `agl run --endpoint` asks it through the gateway, and its calls are recorded."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentlightning.gateway.attempts import AttemptSummary
from agentlightning.runner.endings import Ending, with_gateway
from agentlightning.types import Outcome

from .day import agl, answers, said, script

AGENT = """
import agentlightning as agl
from openai import AsyncOpenAI


@agl.rollout
async def agent(task, llm):
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        messages = [{"role": "user", "content": task}]
        answer = await client.chat.completions.create(model=llm.model, messages=messages)
    return float(answer.choices[0].message.content == "Forty-two.")
"""


class Provider(BaseHTTPRequestHandler):
    """Answers every chat in the same way."""

    asked: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        self.asked.append((json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.headers))
        message = {"role": "assistant", "content": "Forty-two."}
        answer = {
            "id": "a1",
            "object": "chat.completion",
            "created": 1,
            "model": "theirs",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def endpoint() -> Iterator[str]:
    Provider.asked.clear()
    with HTTPServer(("127.0.0.1", 0), Provider) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@pytest.mark.slow
def test_a_model_among_the_resources_is_asked_through_the_gateway(tmp_path: Path, endpoint: str) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    done = script(
        tmp_path,
        f"""
from agent import agent
llm = agl.LLM(endpoint={endpoint!r}, model="theirs", api_key="a-key")
agl.Trainer(initial_resources={{"llm": llm}}, run_dir="run").dev(agent, ["What is 6 * 7?"])
""",
    )
    assert done.returncode == 0, done.stderr
    said(done, "1 rollout, mean reward 1.000, 1 ok", "Calls to theirs: 1 call, 5 tokens")
    ((request, headers),) = Provider.asked
    assert (request["model"], headers["Authorization"]) == ("theirs", "Bearer a-key")
    said(agl(tmp_path, "show", "run/dev"), "What is 6 * 7?", "Forty-two.")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_its_calls_are_recorded_and_shown(tmp_path: Path, endpoint: str) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.json").write_text('["What is 6 * 7?"]')
    where = ("--endpoint", endpoint, "--endpoint-model", "theirs", "--api-key", "a-key", "--run-dir", "run")
    done = agl(tmp_path, "run", "--agent", "agent.py:agent", "--tasks", "tasks.json", *where)
    assert done.returncode == 0, done.stdout + done.stderr
    said(done, "1 rollout, mean reward 1.000, 1 ok")
    ((request, headers),) = Provider.asked
    assert request["model"] == "theirs"
    assert headers["Authorization"] == "Bearer a-key"
    said(agl(tmp_path, "show", "run"), "What is 6 * 7?", "Forty-two.")
    again = agl(tmp_path, "run", "--agent", "agent.py:agent", "--tasks", "tasks.json", *where[:-1], "again", "--json")
    told = json.loads(again.stdout)
    assert (told["rollouts"], told["reward"], told["outcomes"], told["run_dir"]) == (1, 1.0, {"ok": 1}, "again")
    assert [(one["task"], one["error"]) for one in told["each"]] == [("What is 6 * 7?", None)]


def test_what_the_gateway_answered_is_said_once() -> None:
    why = "The provider of 'llm' did not answer: nothing listens at 127.0.0.1:1."
    given = Ending(Outcome.AGENT_ERROR, f"InternalServerError: Error code: 502 - {why}\n  File my_agent.py")
    assert with_gateway(given, AttemptSummary(infra_error=why)).error == f"{why}\n  File my_agent.py"
    given = Ending(Outcome.AGENT_ERROR, "ValueError: no answer\n  File my_agent.py")
    assert with_gateway(given, AttemptSummary(infra_error=why)).error == f"{why}\n{given.error}"


def test_a_runner_gives_up_on_a_store_that_was_never_there_as_soon_as_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    given = ("--server", "http://127.0.0.1:1", "--agent", "agent.py:agent", "--give-up-after", "0.1")
    done = agl(tmp_path, "runner", *given)
    answers(done, "cannot be reached: nothing listens at 127.0.0.1:1. Check that it runs (agl store)")
    assert "is tried again" not in done.stderr  # which is said after three seconds
