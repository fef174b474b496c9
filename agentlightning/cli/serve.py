"""`agl serve`: a model or a checkpoint over the OpenAI API."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path, PurePath

import typer

from agentlightning.algorithm.base import PolicySpec
from agentlightning.algorithm.checkpoint import served_model
from agentlightning.backend import POLICY, Backend, ModelSpec, check_backend
from agentlightning.cli.commands.serve import ServeOptions
from agentlightning.cli.configuration import backend_settings
from agentlightning.cli.interrupt import interrupted
from agentlightning.cli.sample import curl_command
from agentlightning.console import Console, safe
from agentlightning.errors import AgentLightningError, ConfigError, EngineError, GatewayError
from agentlightning.files import with_the_latest
from agentlightning.gateway import Gateway
from agentlightning.gateway.history.answers import RecentAnswers
from agentlightning.gateway.serving.anonymous import AnonymousAccess, Sessions
from agentlightning.gateway.settings import CallSettings
from agentlightning.keys import not_empty
from agentlightning.net.guard import is_local_name
from agentlightning.net.server import LoopServer, check_port
from agentlightning.store import InMemoryLightningStore
from agentlightning.trainer.serving import forget_old_requests, serve_models
from agentlightning.trainer.sync import run_sync

LONGEST_PAUSE = 60.0
"""Seconds between two tries to start a model process that died."""

console = Console(highlight=False, soft_wrap=True)


def run_server(options: ServeOptions) -> None:
    """Serve until Ctrl-C."""
    if options.model is None:
        raise ConfigError(f"Say what to serve: agl serve MODEL.{with_the_latest('serve')}")
    not_empty(options.api_key, "--api-key")
    if not is_local_name(options.host) and options.api_key is None:
        raise ConfigError(f"Listening on {options.host} lets others in: give --api-key, or listen on 127.0.0.1.")
    given = backend_settings(options.computed)
    kind, of_backend = given.get("backend", "embedded"), given.get("backend_options", {})
    check_backend(kind, of_backend)
    with served_model(options.model) as path:
        described = ModelSpec(model=path, max_context=options.max_context, backend_options=of_backend)
        spec = PolicySpec(described, CallSettings(strict_requests=options.strict), backend=kind)
        run_sync(_serve(spec, model_names(options.model, options.name), options))


def model_names(model: str, name: str | None = None) -> list[str]:
    """What clients may call a model that is served, the name to show first: the given `name`, that of the run it
    belongs to, what was typed, and the last part of that.

    >>> model_names("runs/mail/checkpoints/step-000010")[0]
    'mail'
    >>> model_names("Qwen/Qwen3-0.6B")
    ['Qwen/Qwen3-0.6B', 'Qwen3-0.6B']
    """
    path = PurePath(model)
    run = path.parts[path.parts.index("checkpoints") - 1] if "checkpoints" in path.parts[1:] else None
    local = [path.name, model] if Path(model).is_dir() else [model, path.name]
    return [n for n in dict.fromkeys([name, run, *local]) if n and not PurePath(n).is_absolute()]


def aliases_of(names: Sequence[str]) -> dict[str, str]:
    """The names as other names of the policy."""
    return {name: POLICY for name in names if name != POLICY}


async def _serve(spec: PolicySpec, names: Sequence[str], options: ServeOptions) -> None:
    host, api_key, answers = options.host, options.api_key, RecentAnswers(seconds=60 * options.keep_answers)
    model = spec.model.model
    async with AsyncExitStack() as stack:
        store = InMemoryLightningStore()
        stack.push_async_callback(store.close)
        check_port("model", host, options.port, GatewayError)
        with console.status(f"loading {model}"):
            served = await serve_models(stack, store, spec, models=aliases_of(names), any_model_name=True)
        gateway, backend = served.gateway, served.backend
        assert backend is not None, "there is a policy"
        app = AnonymousAccess(gateway, store, api_key, answers=answers, sessions=Sessions(answers.seconds))
        stack.push_async_callback(app.close)
        server = LoopServer(
            app,
            host,
            options.port,
            what="model",
            error=GatewayError,
            trusted=gateway.trusts,
            allow_hosts=options.allow_host,
        )
        await server.start()
        stack.push_async_callback(server.stop)
        url = f"http://{host}:{server.port}/v1"
        console.print(
            f"Serving [bold]{names[0]}[/bold] at [bold]{url}[/bold]  (Ctrl-C stops)\n"
            "It is the only model here, so it answers whatever model a request names.\n\nTry it:"
        )
        typer.echo(f"  {safe(await curl_command(model, url, named=names[0], with_key=api_key is not None))}")
        background = [
            asyncio.create_task(forget_old_requests(store)),
            asyncio.create_task(_keep_running(backend, gateway)),
        ]
        await interrupted()
        for task in background:
            task.cancel()
        console.print("Stopped.")


async def _keep_running(backend: Backend, gateway: Gateway) -> None:
    """Start the backend again whenever it died. Until it is there calls are refused, and `/health` says why."""
    while True:
        try:
            await backend.watch()
        except EngineError as error:
            reason = str(error).splitlines()[0]
        gateway.say_trouble(reason)
        console.print(f"{reason} It is started again.")
        await _start_again(backend)
        gateway.say_trouble(None)
        console.print("It is there again.")


async def _start_again(backend: Backend) -> None:
    for attempt in itertools.count():
        await backend.close()
        try:
            await backend.start()
            return
        except AgentLightningError as error:
            pause = min(2.0**attempt, LONGEST_PAUSE)
            console.print(f"It could not be started: {error}\nThe next try is in {pause:.0f} s.")
            await asyncio.sleep(pause)
