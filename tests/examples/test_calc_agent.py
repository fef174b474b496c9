"""The calculator agent: its tool, its score, and its loop over real HTTP against a scripted model."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import agentlightning as agl
from examples.calc.calc_agent import CALC_TOOL, MAX_TURNS, calc_agent, calculate, score


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ('{"a": 12, "op": "*", "b": 7}', "84"),
        ('{"a": 84, "op": "/", "b": 7}', "12"),
        ('{"a": 1, "op": "/", "b": 3}', "0.3333"),
        ('{"a": 0.1, "op": "+", "b": 0.2}', "0.3"),
        ('{"a": 2, "op": "-", "b": 5}', "-3"),
        ('{"a": 1, "op": "/", "b": 0}', "Error: division by zero"),
        ('{"a": "1 + 2", "op": "*", "b": 3}', "Error: a and b must be numbers"),
        ('{"a": true, "op": "*", "b": 3}', "Error: a and b must be numbers"),
        ('{"a": 1, "op": "**", "b": 3}', "Error: give a, op and b"),
        ('{"a": 1, "op": ["+"], "b": 3}', "Error: give a, op and b"),
        ('{"a": 1, "op": "+"}', "Error: give a, op and b"),
        ("[1, 2]", "Error: give a, op and b"),
        ("12 * 7", "Error: give a, op and b"),
        ('{"a": 1e308, "op": "*", "b": 10}', "Error: not a finite number"),
        ('{"a": NaN, "op": "*", "b": 10}', "Error: not a finite number"),
    ],
)
def test_calculate(arguments: str, result: str) -> None:
    assert calculate(arguments) == result


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("The answer is 84.", 84, 1.0),
        ("12 * 7 = 84", 84, 1.0),
        ("1,084", 1084, 1.0),
        ("-3", -3, 1.0),
        ("0.25", 0.25, 1.0),
        ("The answer is 84.", 85, 0.0),
        ("84 or 85", 84, 0.0),
        ("no idea", 84, 0.0),
        ("", 84, 0.0),
    ],
)
def test_score(text: str, answer: float, reward: float) -> None:
    assert score(text, answer) == reward


@contextmanager
def scripted_model(turns: list[dict[str, Any]], requests: list[dict[str, Any]]) -> Iterator[str]:
    """A chat completions endpoint that says `turns` one by one and keeps the requests; yields its base URL."""

    async def complete(request: Request) -> JSONResponse:
        requests.append({**await request.json(), "key": request.headers["authorization"]})
        message = turns[len(requests) - 1]
        choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": "stop"}
        answer = {"id": "r", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        # The agent's client outlives the test's event loop.
        return JSONResponse(answer, headers={"connection": "close"})

    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()


def call(*arguments: dict[str, Any]) -> dict[str, Any]:
    """An assistant's turn that calls the tool."""
    calls = [
        {"id": f"call-{i}", "type": "function", "function": {"name": "calc", "arguments": json.dumps(given)}}
        for i, given in enumerate(arguments)
    ]
    return {"tool_calls": calls}


async def play(turns: list[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    requests: list[dict[str, Any]] = []
    with scripted_model(turns, requests) as url:
        llm = agl.LLM(endpoint=url, model="calc", api_key="secret")
        reward = await calc_agent({"question": "What is (2 + 3) * 4?", "answer": 20}, llm)
    return reward, requests


async def test_the_agent_uses_the_tool_until_the_model_answers() -> None:
    steps = [call({"a": 2, "op": "+", "b": 3}), call({"a": 5, "op": "*", "b": 4}), {"content": "The answer is 20."}]
    reward, requests = await play(steps)
    assert reward == 1.0
    assert [message["role"] for message in requests[-1]["messages"]] == [
        "system", "user", "assistant", "tool", "assistant", "tool",
    ]  # fmt: skip
    assert [m["content"] for m in requests[-1]["messages"] if m["role"] == "tool"] == ["5", "20"]
    assert requests[0]["tools"] == [CALC_TOOL]
    assert (requests[0]["model"], requests[0]["key"]) == ("calc", "Bearer secret")


async def test_parallel_calls_are_all_answered() -> None:
    both = call({"a": 2, "op": "+", "b": 3}, {"a": "x", "op": "+", "b": 3})
    reward, requests = await play([both, {"content": "21"}])
    assert reward == 0.0
    answers = [m for m in requests[-1]["messages"] if m["role"] == "tool"]
    assert [(m["tool_call_id"], m["content"]) for m in answers] == [
        ("call-0", "5"),
        ("call-1", "Error: a and b must be numbers"),
    ]


async def test_a_model_that_never_answers_gets_nothing() -> None:
    reward, requests = await play([call({"a": 2, "op": "+", "b": 3})] * (MAX_TURNS + 1))
    assert reward == 0.0
    assert len(requests) == MAX_TURNS
