"""`openenv:`: what a server of OpenEnv shows and takes, in words and by tools; what fails is no reward of 0."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import WSMsgType, web

import agentlightning as agl
from agentlightning.environments.openenv import ModuleServer, OpenEnvEnvironment
from agentlightning.environments.playing import _called  # pyright: ignore[reportPrivateUsage]
from agentlightning.errors import ConfigError, ExecutorError
from tests.environments.interpreters import interpreter
from tests.environments.model import Answer, answering, attempted

VERSION = "0.10.0"
APP = Path(__file__).with_name("openenv_app.py")


def schema(**fields: Any) -> dict[str, Any]:
    """Of an action with these fields, as OpenEnv writes it."""
    metadata = {"metadata": {"type": "object", "additionalProperties": True}}
    return {"type": "object", "properties": {**metadata, **fields}, "required": list(fields)}


class Server:
    """A server with OpenEnv's wire format, which answers a step as `step` says."""

    def __init__(self, action: dict[str, Any], step: Any, places: int = 1) -> None:
        self._action, self._step, self._places = action, step, places
        self.heard: list[dict[str, Any]] = []
        self.most = 0
        self._open = 0

    async def _schema(self, _: web.Request) -> web.Response:
        return web.json_response({"action": self._action, "observation": {}, "state": {}})

    async def _ws(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self._open == self._places:
            await socket.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
            await socket.close()
            return socket
        self._open += 1
        self.most = max(self.most, self._open)
        try:
            async for message in socket:
                if message.type is WSMsgType.TEXT and not await self._answered(socket, json.loads(message.data)):
                    break
        finally:
            self._open -= 1
        return socket

    async def _answered(self, socket: web.WebSocketResponse, given: dict[str, Any]) -> bool:
        self.heard.append(given)
        if given["type"] == "close":
            return False
        if given["type"] == "state":
            await socket.send_json({"type": "state", "data": {}})
        elif given["type"] == "reset":
            seen = {"observation": {"hint": "Begin."}, "reward": None, "done": False}
            await socket.send_json({"type": "observation", "data": seen})
        else:
            answer = self._step(given["data"])
            if answer is None:
                return False
            await (socket.send_str if isinstance(answer, str) else socket.send_json)(answer)
        return True

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes([web.get("/schema", self._schema), web.get("/ws", self._ws)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        try:
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()


def observed(reward: Any, done: bool, **seen: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": seen, "reward": reward, "done": done}}


async def played(url: str, answer: Answer, seed: int = 0, **options: Any) -> Any:
    """What an episode earns whose model answers so."""
    env = OpenEnvEnvironment(url, **options)
    task = {"environment": url, "seed": seed}
    with answering(answer) as llm:
        return await env.agent.rollout_async(task, {"main": llm}, attempted(task))


def guessing(data: dict[str, Any]) -> dict[str, Any]:
    return observed(float(data["guess"] == 7), data["guess"] == 7, hint="higher")


async def test_one_field_is_said_in_words() -> None:
    server = Server(schema(guess={"type": "integer", "description": "your number"}), guessing)
    answers = iter(["I think 3", "nothing", "It is 7."])
    seen: list[Any] = []

    def answer(messages: list[dict[str, Any]]) -> str:
        seen.append(messages)
        return next(answers)

    async with server.serving() as url:
        assert await played(url, answer, 11, reset={"level": 2}) == 1.0
    kinds = [(one["type"], one.get("data")) for one in server.heard]
    assert kinds[1:4] == [("reset", {"level": 2, "seed": 11}), ("step", {"guess": 3}), ("step", {"guess": 7})]
    assert "your number" in seen[0][0]["content"]
    assert [m["content"] for m in seen[2] if m["role"] == "user"][:2] == ["Begin.", "higher"]
    assert "names no action" in seen[2][-1]["content"]


async def test_text_is_said_as_it_is_and_rewards_are_summed() -> None:
    server = Server(schema(word={"type": "string"}), lambda data: observed(0.5, data["word"] == "b", hint="on"))
    said = iter(["a", " b "])
    async with server.serving() as url:
        assert await played(url, lambda _: next(said)) == 1.0


async def test_an_episode_that_is_never_done_ends_where_it_is_told_to() -> None:
    server = Server(schema(word={"type": "string"}), lambda _: observed(0.5, False, hint="on"))
    async with server.serving() as url:
        assert await played(url, lambda _: "a", max_steps=3) == 1.5
        with pytest.raises(ConfigError, match="max_steps is 0"):
            await played(url, lambda _: "a", max_steps=0)


async def test_several_fields_are_a_tool_and_what_is_refused_may_be_tried_again() -> None:
    def step(data: dict[str, Any]) -> dict[str, Any]:
        if "b" not in data:
            return {"type": "error", "data": {"message": "b is missing", "code": "VALIDATION_ERROR", "errors": []}}
        return observed(data["a"] + data["b"], True)

    server = Server(schema(a={"type": "integer"}, b={"type": "integer"}), step)
    told: list[Any] = []

    def answer(messages: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
        told.append(messages[-1]["content"])
        return [("act", {"a": 1})] if len(told) == 1 else [("act", {"a": 1, "b": 2})]

    async with server.serving() as url:
        assert await played(url, answer) == 3.0
    assert "b is missing" in told[1]


async def test_arguments_nested_without_end_are_no_action() -> None:
    class Call:
        class function:
            name, arguments = "act", '{"a":' * 100_000

    episode: Any = None  # is not asked
    assert "not JSON" in (await _called(episode, Call)).seen


async def test_tools_of_mcp_are_the_models() -> None:
    def step(data: dict[str, Any]) -> dict[str, Any]:
        if data["type"] == "list_tools":
            tool = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}
            return observed(None, False, tools=[tool])
        assert data["type"] == "call_tool"
        result = sum(data["arguments"].values())
        shown = {"content": [{"type": "text", "text": str(result)}], "data": result}
        return observed(float(result == 5), False, tool_name=data["tool_name"], result=shown)

    action = schema(type={"const": "call_tool"}, tool_name={"type": "string"}, arguments={"type": "object"})
    seen: list[Any] = []

    def answer(messages: list[dict[str, Any]]) -> Any:
        seen.append(messages[-1])
        return [("add", {"a": 2, "b": 3})] if len(seen) == 1 else "It is 5."

    async with Server(action, step).serving() as url:
        assert await played(url, answer) == 1.0
    assert seen[1] == {"role": "tool", "tool_call_id": "c0", "content": "5"}


async def test_episodes_wait_for_a_place() -> None:
    server = Server(schema(guess={"type": "integer"}), guessing, places=1)
    async with server.serving() as url:
        assert await asyncio.gather(*(played(url, lambda _: "7", seed) for seed in range(4))) == [1.0] * 4
    assert server.most == 1


FAILURES = {
    "it breaks": ({"type": "error", "data": {"message": "it broke", "code": "EXECUTION_ERROR"}}, "it broke"),
    "it ends": (None, "ended the connection"),
    "it says what is none": ({"type": "observation"}, "no message"),
    "it says what has no end": ("[" * 100_000, "no message"),
    "its reward is a text": (observed("1", True), "no reward"),
    "its reward is beyond all bounds": (observed(1e308, True), "no reward"),
    "its reward has 400 digits": (observed(10**400, True), "no reward"),
    "its reward is no number": (observed(math.nan, True), "no reward"),
}


@pytest.mark.parametrize("kind", FAILURES)
async def test_what_fails_is_no_reward_of_0(kind: str) -> None:
    answer, words = FAILURES[kind]
    async with Server(schema(guess={"type": "integer"}), lambda _: answer).serving() as url:
        with pytest.raises(ExecutorError, match=words):
            await played(url, lambda _: "7")


def test_a_server_on_this_machine_is_looked_for_before_a_model_is_loaded() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        port = nobody.getsockname()[1]
        with pytest.raises(ConfigError, match=f"nothing listens .* Start the environment's server .*--port {port}"):
            OpenEnvEnvironment(f"http://127.0.0.1:{port}").check()
    OpenEnvEnvironment("http://elsewhere.example:8000").check()  # it may be reached from where the runners are alone


async def test_another_server_is_none_of_openenv() -> None:
    other = web.AppRunner(web.Application())
    await other.setup()
    try:
        place = web.TCPSite(other, "127.0.0.1", 0)
        await place.start()
        with pytest.raises(ConfigError, match="is no server of OpenEnv that answers: 404"):
            await asyncio.to_thread(OpenEnvEnvironment(place.name).check)
    finally:
        await other.cleanup()


async def test_one_that_is_not_there_is_said() -> None:
    with pytest.raises(ExecutorError, match="no server of OpenEnv"):
        await played("http://127.0.0.1:9", lambda _: "7")
    env = agl.load_environment("openenv:http://127.0.0.1:9", tasks=1)
    [probe] = [probe async for probe in env.probes(env.tasks())]
    assert not probe.good
    async with Server(schema(guess={"type": "integer"}), guessing).serving() as url:
        env = agl.load_environment(f"openenv:{url}", tasks=2, val_tasks=1)
        assert [probe.good async for probe in env.probes(env.tasks())] == [True, True]
        assert [task["seed"] for task in env.val_tasks()] == [2]


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ws://127.0.0.1", "http://", "my_env", "my-env:app"])
def test_an_address_is_needed(url: str) -> None:
    with pytest.raises(ConfigError, match="address of a server"):
        agl.load_environment(f"openenv:{url}")


PAGE = """\
import os
async def app(scope, receive, send):
    print("a line of its own")
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": str(os.getpid()).encode()})
"""


def test_the_server_of_a_module_is_started_once_and_again_when_it_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.py").write_text(PAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ModuleServer("page:app", None)

    def process(of: ModuleServer) -> int:
        url, headers = of.address()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url)
        with pytest.raises(urllib.error.HTTPError, match="404") as raised:
            urllib.request.urlopen(urllib.request.Request(url, headers=headers))
        return int(raised.value.read())

    first = process(server)
    assert process(server) == first
    other = pickle.loads(pickle.dumps(server))
    assert process(other) != first, "another process that is sent it has its own"
    os.kill(first, signal.SIGKILL)
    second = first
    while second == first:
        with suppress(OSError):  # it takes a moment to die
            second = process(server)
    del server
    gc.collect()
    assert not psutil.pid_exists(second)


async def test_a_module_that_cannot_be_served_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('it is broken')")
    (tmp_path / "page.py").write_text(PAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, options, words in (
        ("broken:app", {}, "it is broken"),
        ("page:other", {}, "\nThe module 'page' has no 'other'."),
        ("no_such_module:app", {}, "\nThere is no module 'no_such_module' in this folder"),
        ("page:app", {"python": str(tmp_path / "none")}, "cannot be run"),
        ("page:app", {}, "no server of OpenEnv"),
    ):
        env = agl.load_environment(f"openenv:{name}", tasks=1, **options)
        [probe] = [probe async for probe in env.probes(env.tasks())]
        assert not probe.good
        assert words in probe.why
    with pytest.raises(ConfigError, match="python is for a module"):
        agl.load_environment("openenv:http://127.0.0.1:9", python="p")


@pytest.fixture(scope="module")
def openenv() -> str:
    """An interpreter with OpenEnv: OPENENV_PYTHON, or one that is made."""
    return interpreter("OPENENV_PYTHON", (f"openenv=={VERSION}",), (sys.executable,))


@pytest.fixture
def served(openenv: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """One of the real environments, by the parameter."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [openenv, "-m", "uvicorn", f"{APP.stem}:{request.param}", "--port", str(port)]
    process = subprocess.Popen(command, cwd=APP.parent, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/health").read()
                break
            except OSError:
                subprocess.run(["sleep", "0.1"], check=True)
        yield url
    finally:
        process.kill()
        process.wait()


def bisecting(messages: list[dict[str, Any]]) -> str:
    low, high = 1, 10
    for said, told in pairwise(messages):
        if said["role"] == "assistant" and told["content"] in ("higher", "lower"):
            number = int(said["content"])
            low, high = (number + 1, high) if told["content"] == "higher" else (low, number - 1)
    return str((low + high) // 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("served", "answer"),
    [
        ("guess", bisecting),
        ("pair", lambda _: [("act", {"first": 4, "second": 6})]),
        ("tools", lambda _: [("add", {"a": 2, "b": 3})]),
    ],
    indirect=["served"],
    ids=["guess", "pair", "tools"],
)
async def test_with_the_package_itself(served: str, answer: Answer) -> None:
    assert await asyncio.gather(*(played(served, answer, seed) for seed in range(8))) == [1.0] * 8


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_module_of_the_package_itself(openenv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(APP.parent))
    name = f"{APP.stem}:guess"
    server = ModuleServer(name, openenv)
    url, headers = server.address()
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            await session.ws_connect(f"{url}/ws")
        async with session.ws_connect(f"{url}/ws", headers=headers):
            pass
    assert await asyncio.gather(*(played(name, bisecting, n, python=openenv) for n in range(2))) == [1.0] * 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("served", ["pair"], indirect=True)
async def test_what_the_package_says_of_wrong_actions(served: str) -> None:
    with pytest.raises(ExecutorError, match="too large"):
        await played(served, lambda _: [("act", {"first": 101, "second": 0})])
    told: list[str] = []

    def answer(messages: list[dict[str, Any]]) -> Any:
        told.append(messages[-1]["content"])
        return [("act", {"first": 1})] if len(told) == 1 else [("act", {"first": 1, "second": 9})]

    assert await played(served, answer) == 1.0
    assert "no action" in told[1]
