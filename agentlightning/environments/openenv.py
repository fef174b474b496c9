"""`openenv:URL` or `openenv:MODULE:APP`: an environment of OpenEnv, played over its server's WebSocket.

The server of a module is started here, in an interpreter with OpenEnv, and ends with this process.

An action with one field is said in words; one that consists of tools of MCP, or of several fields, is a call of a tool.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from agentlightning.environments.base import Environment, Probe
from agentlightning.environments.foreign import module_path
from agentlightning.environments.playing import ActionResult, PlayedEpisode, Player, last_number, seeds_of
from agentlightning.errors import ConfigError, ExecutorError, RewardError
from agentlightning.files import reason_of_file
from agentlightning.litagent.isolation import base_environment
from agentlightning.net.outgoing import http_session, reason_of
from agentlightning.types.reward import checked_reward

_FULL = "CAPACITY_REACHED"
_WAIT_SECONDS = 120.0
"""How long an episode waits for a place; a server has one for each environment that it may have at a time."""
_OWN = ("reward", "done", "metadata")
_ACT = "act"
_MODULE = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*")
_SERVER = Path(__file__).parent / "workers" / "openenv_server.py"


class OpenEnvEnvironment(Environment):
    """An environment of OpenEnv: one field to say, several fields, or tools of MCP."""

    summary = "an environment of OpenEnv, by its server's URL or its module, played in words or by tools"
    tested = "openenv 0.10.0"

    def __init__(
        self,
        url: str,
        *,
        python: str | None = None,
        tasks: int = 64,
        val_tasks: int = 0,
        first_seed: int = 0,
        instructions: str | None = None,
        remembers: bool = True,
        answer_tokens: int | None = None,
        max_steps: int | None = None,
        reset: Mapping[str, Any] | None = None,
        seconds: float = 60.0,
    ) -> None:
        """
        Args:
            url: The server's, such as http://127.0.0.1:8000, or the module with its application, such as my_env:app.
            python: The interpreter in which the module and OpenEnv are installed; this one if not given.
            tasks: How many there are. A task is a seed, with which its episode begins.
            val_tasks: How many further ones there are to validate on.
            first_seed: The seed of the first task.
            instructions: What the model is told first; what the actions are if not given.
            remembers: Whether the model sees the episode so far, or the newest observation alone.
            answer_tokens: So many tokens an answer may have; what the run's settings say if not given.
            max_steps: After so many answers with an action an episode ends with what it has earned. An environment that
                never says that it is done goes on until the model's context is full, if this is not given.
            reset: Further arguments of the environment's `reset`.
            seconds: How long the environment may take to answer.
        """
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self._server: ModuleServer | None = None
        if parts.scheme not in ("http", "https") and _MODULE.fullmatch(url):
            self._server = ModuleServer(url, python)
        elif parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"openenv:{url}: give the address of a server, such as openenv:http://127.0.0.1:8000, or a module with "
                "its application, such as openenv:my_env:app."
            )
        elif python is not None:
            raise ConfigError("python is for a module, such as openenv:my_env:app; a server has its own interpreter.")
        if max_steps is not None and max_steps < 1:
            raise ConfigError(f"openenv: max_steps is {max_steps}, and at least 1 is needed.")
        self._seeds, self._val_seeds = seeds_of("openenv", tasks, val_tasks, first_seed)
        self.instructions, self.reset, self.seconds = instructions, dict(reset or {}), seconds
        limits = {"answer_tokens": answer_tokens, "max_steps": max_steps}
        self.agent = Player(f"openenv:{url}", self.open, remembers=remembers, **limits)

    def tasks(self) -> Sequence[Any]:
        return [self._task(seed) for seed in self._seeds]

    def val_tasks(self) -> Sequence[Any]:
        return [self._task(seed) for seed in self._val_seeds]

    def check(self) -> None:
        parts = urlsplit(self.url)
        if self._server is not None or parts.hostname not in ("localhost", "127.0.0.1", "::1"):
            return
        try:
            asyncio.run(self._answers())
        except ExecutorError as error:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            raise ConfigError(
                f"{error}. Start the environment's server first (uvicorn my_env:app --port {port}), or give its "
                "module, openenv:my_env:app, which is started here."
            ) from error

    async def _answers(self) -> None:
        async with http_session() as session:
            await self._schema(session, self.url, {})

    async def _schema(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> dict[str, Any]:
        """What an action is. Raises ExecutorError where no server of OpenEnv answers."""
        try:
            async with asyncio.timeout(self.seconds), session.get(f"{url}/schema", headers=headers) as found:
                found.raise_for_status()
                return (await found.json())["action"]
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError, RecursionError, TimeoutError) as error:
            raise ExecutorError(
                f"openenv:{self.url} is no server of OpenEnv that answers: {reason_of(error)}"
            ) from error

    def _task(self, seed: int) -> Any:
        return {"environment": self.url, "seed": seed}

    async def probes(self, tasks: Sequence[Any]) -> AsyncIterator[Probe]:
        for task in tasks:
            began, why, seen = time.perf_counter(), "", ""
            try:
                async with self.open(task["seed"]) as episode:
                    seen = await episode.begin()
            except ExecutorError as error:
                why = str(error)
            seconds = time.perf_counter() - began
            yield Probe(
                task=f"seed {task['seed']}",
                by="nothing",
                reward=None if why else 0.0,
                expected="it begins",
                good=not why,
                why=why or seen,
                seconds=seconds,
            )

    @asynccontextmanager
    async def open(self, seed: int) -> AsyncIterator[_OpenEnvEpisode]:
        """An episode with a connection of its own. Raises ExecutorError where the server has none."""
        async with http_session(timeout=aiohttp.ClientTimeout(total=None, connect=self.seconds)) as session:
            url, headers = self.url, {}
            if self._server is not None:
                url, headers = await asyncio.to_thread(self._server.address)
            schema = await self._schema(session, url, headers)
            connection = await _connected(session, url, headers, self.seconds)
            try:
                yield _OpenEnvEpisode(self, connection, schema, seed)
            finally:
                await asyncio.shield(_closed(connection))


class ModuleServer:
    """The server of a module's application, started when it is first asked for, and again when it has died."""

    def __init__(self, application: str, python: str | None) -> None:
        self._application = application
        self._python = str(Path(python).expanduser()) if python else sys.executable
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._url, self._key = "", secrets.token_urlsafe(16)
        self._end: Callable[[], Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleServer, (self._application, self._python)  # another process has a server of its own

    def address(self) -> tuple[str, dict[str, str]]:
        """Its URL, and the headers that it asks for. Raises ExecutorError where the module cannot be loaded."""
        with self._starting:
            if self._process is not None and self._process.poll() is not None and self._end is not None:
                self._end()
                self._process = None
            if self._process is None:
                self._start()
            return self._url, {"x-agl-key": self._key}

    def _start(self) -> None:
        with tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(
                    [self._python, str(_SERVER), self._application],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env={**base_environment(), "PYTHONPATH": module_path()},
                )
            except OSError as error:
                raise ExecutorError(
                    f"openenv: {self._python} cannot be run (python=…): {reason_of_file(error)}"
                ) from None
            assert process.stdout is not None
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(f"{self._key}\n".encode())
                process.stdin.flush()
            late = threading.Timer(_WAIT_SECONDS, process.kill)
            late.start()
            port = process.stdout.readline().decode().strip()
            late.cancel()
            if not port.isdigit():
                process.kill()
                _end(process)
                errors.seek(0)
                complaint = errors.read().decode(errors="replace").strip()[-800:]
                raise ExecutorError(f"openenv: {self._application} cannot be served by {self._python}.\n{complaint}")
        self._process, self._url = process, f"http://127.0.0.1:{port}"
        self._end = weakref.finalize(self, _end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """By the end of its stdin."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
    process.wait()


async def _connected(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], seconds: float
) -> aiohttp.ClientWebSocketResponse:
    """A connection that has a place. Waits for one where the server is full."""
    until = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            connection = await session.ws_connect(f"{url}/ws", headers=headers, max_msg_size=64 * 1024 * 1024)
            await connection.send_str(json.dumps({"type": "state"}))
            answer = await _received(connection, seconds)
        except (aiohttp.ClientError, OSError) as error:
            raise ExecutorError(f"openenv:{url} opens no WebSocket: {reason_of(error)}") from error
        if not (answer["type"] == "error" and answer["data"].get("code") == _FULL):
            return connection
        await _closed(connection)
        if time.monotonic() > until:
            raise ExecutorError(
                f"openenv:{url} had no place for {_WAIT_SECONDS:g} s. Its server's max_concurrent_envs says how many "
                "there are; run fewer rollouts at once (--concurrency)."
            )
        await asyncio.sleep(0.2)


async def _received(connection: aiohttp.ClientWebSocketResponse, seconds: float) -> dict[str, Any]:
    """The next message. Raises ExecutorError where there is none, or none that OpenEnv sends."""
    try:
        message = await connection.receive(timeout=seconds)
    except TimeoutError:
        raise ExecutorError(f"The environment took more than {seconds:g} s to answer (seconds).") from None
    try:
        found = json.loads(message.data) if message.type is aiohttp.WSMsgType.TEXT else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("data"), dict) or "type" not in found:
        raise ExecutorError(f"The environment ended the connection or sent what is no message: {message.data!r:.200}")
    return found


async def _closed(connection: aiohttp.ClientWebSocketResponse) -> None:
    try:
        async with asyncio.timeout(2.0):
            await connection.send_str(json.dumps({"type": "close"}))
            await connection.close()
    except (aiohttp.ClientError, OSError, TimeoutError):
        pass


class _OpenEnvEpisode(PlayedEpisode):
    def __init__(
        self,
        environment: OpenEnvEnvironment,
        connection: aiohttp.ClientWebSocketResponse,
        schema: Mapping[str, Any],
        seed: int,
    ) -> None:
        self._environment, self._connection, self._seed = environment, connection, seed
        self._fields = {name: one for name, one in schema.get("properties", {}).items() if name != "metadata"}
        self._schema = {**schema, "properties": self._fields}
        self._by_mcp = "tool_name" in self._fields or (not self._fields and schema.get("additionalProperties", True))
        self._only = next(iter(self._fields.items())) if len(self._fields) == 1 and not self._by_mcp else None
        if self._only is not None and self._only[1].get("type") not in ("string", "integer", "number"):
            self._only = None
        self.instructions = environment.instructions or self._complaint()

    def _complaint(self) -> str:
        if self._only is None:
            return "You act by calling the tools that you have."
        name, schema = self._only
        kind = {"string": "text", "integer": "a whole number", "number": "a number"}[schema["type"]]
        about = f" ({schema['description']})" if schema.get("description") else ""
        return f"You act by your answers. An answer is your {name}{about}: {kind}."

    async def begin(self) -> str:
        data = await self._ask("reset", {**self._environment.reset, "seed": self._seed})
        if self._by_mcp:
            listed = await self._ask("step", {"type": "list_tools"})
            self.tools = [_tool(one) for one in listed["observation"].get("tools", ())]
            if not self.tools:
                raise ExecutorError("The environment takes calls of tools, and has none.")
        elif self._only is None:
            about = str(self._schema.get("description") or "Act.")
            function = {"name": _ACT, "description": about, "parameters": _parameters(self._schema)}
            self.tools = [{"type": "function", "function": function}]
        return _shown(data)

    async def act(self, answer: str) -> ActionResult:
        if self._only is None:
            return ActionResult("Call one of the tools to act.", 0.0, over=False, taken=False)
        name, schema = self._only
        value: Any = answer.strip() if schema["type"] == "string" else last_number(answer)
        if not value:
            return ActionResult(f"That names no action. {self._complaint()}", 0.0, over=False, taken=False)
        if schema["type"] != "string":
            value = float(value) if schema["type"] == "number" or "." in value else int(value)
        return await self._step({name: value})

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ActionResult:
        if self._by_mcp:
            return await self._step({"type": "call_tool", "tool_name": name, "arguments": dict(arguments)})
        if name != _ACT:
            return ActionResult(f"There is no tool {name}.", 0.0, over=False, taken=False)
        return await self._step(dict(arguments))

    async def _step(self, action: Mapping[str, Any]) -> ActionResult:
        data = await self._ask("step", action, refusable=True)
        if "errors" in data or "code" in data:
            return ActionResult(f"That is no action: {data.get('message')}", 0.0, over=False, taken=False)
        given = data.get("reward")
        try:
            reward = 0.0 if given is None else checked_reward(given)  # which may be true or false in OpenEnv
        except RewardError as error:
            raise ExecutorError(f"The environment gave what is no reward: {error}") from None
        return ActionResult(_shown(data), reward, over=bool(data.get("done")))

    async def _ask(self, kind: str, data: Mapping[str, Any], *, refusable: bool = False) -> dict[str, Any]:
        """The data of the environment's answer. Raises ExecutorError where it fails."""
        try:
            await self._connection.send_str(json.dumps({"type": kind, "data": data}))
        except (aiohttp.ClientError, OSError) as error:
            raise ExecutorError(f"The environment ended the connection: {error}") from error
        answer = await _received(self._connection, self._environment.seconds)
        if answer["type"] != "error":
            return answer["data"]
        if refusable and answer["data"].get("code") == "VALIDATION_ERROR":
            return {"code": "VALIDATION_ERROR", **answer["data"]}
        raise ExecutorError(f"The environment failed: {json.dumps(answer['data'])[:500]}")


def _tool(listed: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of MCP in the form of chat completions."""
    parameters = listed.get("input_schema") or listed.get("inputSchema") or {"type": "object", "properties": {}}
    function = {"name": listed["name"], "description": listed.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: schema[name] for name in ("type", "properties", "required", "$defs") if name in schema}


def _shown(data: Mapping[str, Any]) -> str:
    """An observation in words: its only text, else JSON without the fields that are shown elsewhere."""
    observation = {k: v for k, v in (data.get("observation") or {}).items() if k not in _OWN and v is not None}
    if isinstance(observation.get("tool_name"), str):  # the result of a call
        failed = observation.get("error")
        result = failed if failed is not None else observation.get("result")
        parts = result.get("content") if isinstance(result, Mapping) else None
        if isinstance(parts, list) and parts and all(isinstance(part.get("text"), str) for part in parts):
            return "\n".join(part["text"] for part in parts)  # as MCP writes a result
        return result if isinstance(result, str) else json.dumps(result)
    values = list(observation.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(observation)
