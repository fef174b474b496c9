"""`python -m agent_lightning.server`: takes tasks from clients, and trains while they run the agent.

POST /data        {"train": [task, …], "test": [task, …]}
POST /train       starts a training, or joins the one that runs; answers where its store is
POST /evaluate    {"tasks": [task, …]}: the same for running the trained model on tasks
POST /status      {"client": id, "wait": seconds}; answers when it is over, or after that time
POST /leave       {"client": id}: the client needs the store no longer
POST /stop        ends what runs, with its last finished step kept
POST /checkpoint  the trained model, as a zip file
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from agent_lightning.settings import ALGORITHMS, Settings, make_algorithm, of_gpus, read_settings
from agent_lightning.trainings import CLIENT_SECONDS, Trainings
from agentlightning.algorithm.checkpoint import model_path
from agentlightning.errors import AgentLightningError, ConfigError, ConflictError
from agentlightning.keys import not_empty
from agentlightning.net.guard import is_local_name
from agentlightning.net.local_keys import kept_key, made_key
from agentlightning.net.server import LoopServer
from agentlightning.trainer.sync import run_sync
from agentlightning.types import RolloutConfig


def create_app(trainings: Trainings, api_key: str | None) -> Starlette:
    """The server's HTTP side."""

    def route(path: str, answer: Callable[[dict[str, Any]], Awaitable[Any]]) -> Route:
        async def endpoint(request: Request) -> Response:
            _check_key(request, api_key)
            found = await answer(_read(await request.body()))
            return found if isinstance(found, Response) else JSONResponse(found)

        return Route(path, endpoint, methods=["POST"])

    async def data(given: dict[str, Any]) -> dict[str, int]:
        train, test = (_tasks(given, name) for name in ("train", "test"))
        if not train:
            raise HTTPException(400, "There are no training tasks: send at least one.")
        trainings.upload(train, test)
        return {"train": len(trainings.train), "test": len(trainings.test)}

    async def train(given: dict[str, Any]) -> dict[str, Any]:
        retries = int(_number(given, "max_retries") or 0)
        return await trainings.join_training(_client(given), _number(given, "timeout"), retries)

    async def evaluate(given: dict[str, Any]) -> dict[str, Any]:
        retries = int(_number(given, "max_retries") or 0)
        tasks, timeout = _tasks(given, "tasks"), _number(given, "timeout")
        return await trainings.join_evaluation(_client(given), tasks, timeout, retries)

    async def status(given: dict[str, Any]) -> dict[str, Any]:
        return await trainings.status(given.get("client"), _number(given, "wait") or 0.0)

    async def leave(given: dict[str, Any]) -> dict[str, str]:
        trainings.leave(_client(given))
        return {"state": "left"}

    async def stop(_: dict[str, Any]) -> dict[str, Any]:
        return await trainings.stop()

    async def checkpoint(_: dict[str, Any]) -> FileResponse:
        found = trainings.checkpoint()
        packed = await asyncio.to_thread(_pack, model_path(found))
        return FileResponse(packed, filename=f"{found.name}.zip", background=BackgroundTask(packed.unlink))

    answers = (data, train, evaluate, status, leave, stop, checkpoint)
    return Starlette(
        routes=[route(f"/{answer.__name__}", answer) for answer in answers],
        exception_handlers={AgentLightningError: _refused, HTTPException: _refused},
    )


def _check_key(request: Request, api_key: str | None) -> None:
    given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    if api_key is not None and not hmac.compare_digest(given.encode(), api_key.encode()):
        raise HTTPException(401, "This server needs its key: Client(url, api_key=…) or AGENT_LIGHTNING_API_KEY.")


async def _refused(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        return JSONResponse({"detail": error.detail}, error.status_code)
    return JSONResponse({"detail": str(error)}, 409 if isinstance(error, ConflictError) else 400)


def _read(body: bytes) -> dict[str, Any]:
    """What a request says; nothing where it has no body."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any]) if body else {}
    except (msgspec.DecodeError, RecursionError) as error:
        raise HTTPException(422, f"The body is no JSON object: {error}.") from error


def _tasks(given: Mapping[str, Any], name: str) -> list[Any]:
    tasks = given.get(name) or []
    if not isinstance(tasks, list):
        raise HTTPException(422, f"`{name}` is no list of tasks.")
    return tasks


def _number(given: Mapping[str, Any], name: str) -> float | None:
    number = given.get(name)
    if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
        raise HTTPException(422, f"`{name}` is no number.")
    return number


def _client(given: dict[str, Any]) -> str:
    client = given.get("client")
    if not isinstance(client, str) or not client:
        raise HTTPException(400, 'Say who asks: {"client": an id of your own, …}.')
    return client


def _pack(folder: Path) -> Path:
    handle, name = tempfile.mkstemp(prefix="agl-checkpoint-", suffix=".zip")
    with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as packed:
        for path in sorted(folder.rglob("*")):
            packed.write(path, path.relative_to(folder))
    return Path(name)


async def serve(
    settings: Settings,
    host: str,
    port: int,
    api_key: str | None,
    runs: Path | None = None,
    client_seconds: float = CLIENT_SECONDS,
    open_to_all: bool = False,
) -> None:
    """Serve until cancelled, or until SIGINT or SIGTERM; what runs then ends at once.

    On loopback without a key one is made, which clients of the same user find, unless it is `open_to_all`.
    """
    not_empty(api_key, "AGENT_LIGHTNING_API_KEY")
    if open_to_all and api_key is not None:
        raise ConfigError("--no-key lets everybody on this machine in; unset AGENT_LIGHTNING_API_KEY, or leave it out.")
    if not is_local_name(host) and api_key is None:
        raise ConfigError(f"Listening on {host} lets others in: set AGENT_LIGHTNING_API_KEY, or listen on 127.0.0.1.")
    make_algorithm(settings, RolloutConfig())  # what is wrong with the settings shows now
    trainings = Trainings(settings, host, runs or Path("runs"), client_seconds)
    made = made_key(api_key, host, open_to_all=open_to_all)
    server = LoopServer(create_app(trainings, made or api_key), host, port, what="server", error=AgentLightningError)
    await server.start()
    ended = asyncio.Event()
    with suppress(NotImplementedError, RuntimeError, ValueError):  # Windows; a loop that is not the main thread's
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        with kept_key(server.port, made):  # before anybody knows the address
            print(f"Agent Lightning trains {settings.name} at http://{host}:{server.port}", flush=True)  # noqa: T201
            if made is not None:
                print(f"Clients of yours on this machine find its key; others send {made}", flush=True)  # noqa: T201
            await ended.wait()
    finally:
        await trainings.close()
        await server.stop()


def check_gpus(gpus: int) -> None:
    """Raises ConfigError where torch finds fewer. It is asked in another process: servers do not load torch."""
    command = [sys.executable, "-c", f"import torch; torch.empty(0, device='cuda:{gpus - 1}')"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["the check failed"])[-1]
        found = "no GPU" if gpus == 1 else "not so many GPUs"
        raise ConfigError(f"--gpus is {gpus}, and there is {found} to train on ({why}). Leave it out, or give 0.")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m agent_lightning.server", description="Trains while clients run agents."
    )
    parser.add_argument("--model", help="a model's name, directory or Hugging Face id")
    parser.add_argument("--algorithm", help=", ".join(ALGORITHMS))
    parser.add_argument("--gpus", type=int, help="how many to train on, 0 for the processor; else it is found out")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--config", type=Path, help="a YAML file with the sections model, training, runtime")
    parser.add_argument(
        "--client-timeout",
        type=float,
        default=CLIENT_SECONDS,
        help="a run whose clients were not heard of for so many seconds is stopped (%(default)g)",
    )
    parser.add_argument("--no-key", action="store_true", help="let everybody on this machine in")
    given = parser.parse_args(arguments)
    try:
        settings = read_settings(given.config)
        settings = replace(settings, options={**settings.options, **of_gpus(given.gpus)})
        if given.gpus:
            check_gpus(given.gpus)
        settings = replace(settings, name=given.model or settings.name, algorithm=given.algorithm or settings.algorithm)
        key = os.environ.get("AGENT_LIGHTNING_API_KEY")
        seconds = given.client_timeout
        run_sync(serve(settings, given.host, given.port, key, client_seconds=seconds, open_to_all=given.no_key))
    except AgentLightningError as error:
        parser.exit(1, f"{error}\n")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
