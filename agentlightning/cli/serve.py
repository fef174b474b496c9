"""`agl serve`: a model or a checkpoint over the OpenAI API."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import typer
from rich.console import Console

from agentlightning.algorithm.base import PolicySpec
from agentlightning.algorithm.checkpoint import served_model
from agentlightning.backend import ModelSpec
from agentlightning.cli.interrupt import interrupted
from agentlightning.cli.sample import curl_command
from agentlightning.errors import ConfigError, GatewayError
from agentlightning.gateway.serving.anonymous import AnonymousAccess
from agentlightning.keys import not_empty
from agentlightning.serving import LoopServer
from agentlightning.store import InMemoryLightningStore
from agentlightning.trainer.serving import serve_models
from agentlightning.trainer.sync import run_sync

KEPT_REQUESTS = 1000
PRUNE_SECONDS = 60.0

console = Console(highlight=False, soft_wrap=True)


def run_server(model: str, *, host: str, port: int, api_key: str | None) -> None:
    """Serve until Ctrl-C."""
    not_empty(api_key, "--api-key")
    if host not in ("127.0.0.1", "localhost", "::1") and api_key is None:
        raise ConfigError(f"Listening on {host} lets others in: give --api-key, or listen on 127.0.0.1.")
    run_sync(_serve(served_model(model), host, port, api_key))


async def _serve(model: str, host: str, port: int, api_key: str | None) -> None:
    async with AsyncExitStack() as stack:
        store = InMemoryLightningStore()
        stack.push_async_callback(store.close)
        with console.status(f"loading {model}"):
            gateway = (await serve_models(stack, store, PolicySpec(ModelSpec(model=model)))).gateway
        server = LoopServer(AnonymousAccess(gateway, store, api_key), host, port, what="model", error=GatewayError)
        await server.start()
        stack.push_async_callback(server.stop)
        url = f"http://{host}:{server.port}/v1"
        console.print(f"Serving [bold]{model}[/bold] at [bold]{url}[/bold]  (Ctrl-C stops)\n\nTry it:")
        typer.echo(f"  {await curl_command(model, url, with_key=api_key is not None)}")
        forgetting = asyncio.create_task(_forget_old_requests(store))
        await interrupted()
        forgetting.cancel()
        console.print("Stopped.")


async def _forget_old_requests(store: InMemoryLightningStore) -> None:
    """Every request is recorded in a temporary file; a server that runs for months must not fill the disk with it."""
    while True:
        await asyncio.sleep(PRUNE_SECONDS)
        await store.prune(keep=KEPT_REQUESTS)
