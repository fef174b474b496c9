"""`agl gateway`: the gateway by itself, in front of a model of ours or of other providers, recording in a store."""

from __future__ import annotations

import json
import logging
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from pathlib import Path

from agentlightning.algorithm.base import PolicySpec
from agentlightning.algorithm.checkpoint import served_model
from agentlightning.algorithm.episode import collect
from agentlightning.backend import ModelSpec
from agentlightning.cli.commands.operate import GatewayOptions
from agentlightning.cli.export import trajectory_of_episode
from agentlightning.cli.interrupt import interrupted
from agentlightning.cli.serve import aliases_of, model_names
from agentlightning.cli.store import read_secret
from agentlightning.cli.upstream import read_upstreams
from agentlightning.console import Console
from agentlightning.errors import ConfigError, GatewayError
from agentlightning.files import atomic_write, make_folder
from agentlightning.gateway import Gateway, Provider
from agentlightning.gateway.history.answers import RecentAnswers
from agentlightning.gateway.routing.models import Model
from agentlightning.gateway.serving.anonymous import AnonymousAccess, Sessions
from agentlightning.gateway.settings import CallSettings
from agentlightning.keys import derived_secret, not_empty
from agentlightning.net.guard import is_local_name
from agentlightning.net.local_keys import find_key, kept_key, made_key
from agentlightning.net.server import LoopServer
from agentlightning.store import LightningStoreClient, SqliteLightningStore
from agentlightning.store.base import LightningStore
from agentlightning.trainer.live import readable_by_others
from agentlightning.trainer.serving import serve_models
from agentlightning.trainer.sync import run_sync

console = Console(highlight=False, soft_wrap=True)
logger = logging.getLogger(__name__)


def run_gateway(options: GatewayOptions) -> None:
    """Serve until Ctrl-C. Who reaches a gateway with a provider's key can spend by it, so that such a gateway has a key
    of its own unless `--no-key` is given.
    """
    api_key, server = not_empty(options.api_key, "--api-key"), options.server
    if not is_local_name(options.host) and api_key is None:
        raise ConfigError(f"Listening on {options.host} lets others in: give --api-key, or listen on 127.0.0.1.")
    not_empty(options.key, "--key")
    models = read_upstreams(options.providers)
    if options.no_key and api_key is not None:
        raise ConfigError("--no-key lets everybody on this machine in, and --api-key only those who have the key.")
    if options.model is None and not models:
        raise ConfigError("Say what to serve: --model MODEL, or --upstream NAME=URL of another provider.")
    if options.strict and options.model is None:
        raise ConfigError("--strict is of a model that is served here (--model): other providers check for themselves.")
    if server is not None and options.path != Path("gateway.db"):
        raise ConfigError("Calls are recorded in a file (--path) or in the store of --server: give one of them.")
    if options.atif is not None:
        try:
            make_folder(options.atif)
        except OSError as error:
            raise ConfigError(f"--atif {options.atif}: {error.strerror or error}.") from None
    secret = None if options.secret_file is None else read_secret(options.secret_file, create=True)
    store_key = options.key or (find_key(server) if server else None)
    if secret is None and server and store_key:
        secret = derived_secret(store_key)  # as runners of this store do
    store = LightningStoreClient(server, key=store_key) if server else SqliteLightningStore(options.path)
    run_sync(_serve(store, models, secret, options))


async def _serve(
    store: LightningStore, models: dict[str, Provider], secret: bytes | None, options: GatewayOptions
) -> None:
    model, host = options.model, options.host
    spends = any(provider.api_key for provider in models.values())
    made = made_key(options.api_key, host, open_to_all=options.no_key or not spends)
    answers = RecentAnswers(seconds=60 * options.keep_answers)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        await store.statistics()  # is it there, and may we?
        if isinstance(store, SqliteLightningStore):
            await readable_by_others(stack, store, options.path)
        with console.status(f"loading {model}") if model else nullcontext():
            gateway = await _made_gateway(stack, store, models, secret, options)
        ended = None if options.atif is None else partial(_write_trajectory, store, options.atif)
        sessions = Sessions(answers.seconds, ended=ended)
        app = AnonymousAccess(gateway, store, made or options.api_key, answers=answers, sessions=sessions)
        stack.push_async_callback(app.close)
        front = LoopServer(
            app,
            host,
            options.port,
            what="gateway",
            error=GatewayError,
            trusted=gateway.trusts,
            allow_hosts=options.allow_host,
        )
        await front.start()
        stack.push_async_callback(front.stop)
        stack.enter_context(kept_key(front.port, made))  # before anybody knows the address
        console.print(
            f"Serving [bold]{', '.join(gateway.names())}[/bold] at [bold]http://{host}:{front.port}/v1[/bold] "
            f"(Ctrl-C stops)\nCalls are recorded in {options.server or options.path}"
        )
        if made is not None:
            stays = "made for this start; --api-key gives one that stays, --no-key none"
            console.show_key("Clients send the key", made, stays)
        await interrupted()
        console.print("Stopped.")


async def _made_gateway(
    stack: AsyncExitStack,
    store: LightningStore,
    models: dict[str, Provider],
    secret: bytes | None,
    options: GatewayOptions,
) -> Gateway:
    """The gateway in front of the providers, and of the model of these options, which is loaded."""
    policy, served = None, dict[str, Model](models)
    if options.model is not None:
        served = {**aliases_of(model_names(options.model, options.name)), **models}
        model = stack.enter_context(served_model(options.model))
        policy = PolicySpec(ModelSpec(model=model), CallSettings(strict_requests=options.strict))
    made = await serve_models(stack, store, policy, models=served, any_model_name=True, secret=secret)
    return made.gateway


async def _write_trajectory(store: LightningStore, folder: Path, rollout_id: str) -> None:
    """Of a session that is over. One that cannot be written stays in the store, from where `agl export` takes it, and
    keeps no other session from ending."""
    try:
        for episode in await collect(store, [rollout_id]):
            trajectory = await trajectory_of_episode(store, episode)
            if trajectory is not None:
                atomic_write(folder / f"{rollout_id}.json", json.dumps(trajectory, ensure_ascii=False))
    except Exception as error:
        logger.warning("The trajectory of %s could not be written: %s. agl export --atif writes it.", rollout_id, error)
