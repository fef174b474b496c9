"""The composition root of what agents talk to: a backend and a gateway in front of it, on a store that is there.

The trainer, `agl serve`, `agl eval` and `agl gateway` all start them here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentlightning.algorithm.base import PolicySpec
from agentlightning.backend import POLICY, Backend, make_backend
from agentlightning.errors import GatewayError, missing_extra
from agentlightning.gateway import Gateway
from agentlightning.gateway.dialects import DIALECTS, Dialect
from agentlightning.gateway.routing.models import Frozen, Model, Trained
from agentlightning.gateway.settings import CallSettings
from agentlightning.models import resolve_model
from agentlightning.models.shape import read_shape
from agentlightning.net.server import check_port
from agentlightning.store.base import LightningStore
from agentlightning.store.sql import SqlLightningStore
from agentlightning.types import NamedResources
from agentlightning.types.call import Spent

logger = logging.getLogger(__name__)

KEPT_REQUESTS = 1000
PRUNE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ServedModels:
    """What was started."""

    gateway: Gateway
    backend: Backend | None
    """None where the gateway is only in front of other providers."""
    aliases: tuple[str, ...]
    """Of the models besides the first policy."""
    sampling: Mapping[str, Any]
    """What training samples with, whatever an agent asks for."""
    val_sampling: Mapping[str, Any]
    """The same of validation, as far as it is settled."""

    def resources(self) -> NamedResources:
        """The first policy's endpoint as `llm`, and every other model's under its alias. Without a policy `llm` is the
        first of the others."""
        policy = None if self.backend is not None else next(iter(self.aliases), None)
        others = {alias: self.gateway.as_resource(alias) for alias in self.aliases}
        llm = self.gateway.as_resource(policy, sampling_parameters=dict(self.sampling) if policy is None else {})
        if policy is None and self.val_sampling:
            llm = llm.model_copy(update={"val_sampling_parameters": dict(self.val_sampling)})
        return {"llm": llm, **others}


async def serve_models(
    stack: AsyncExitStack,
    store: LightningStore,
    policy: PolicySpec | None,
    *,
    models: Mapping[str, Model] | None = None,
    any_model_name: bool = False,
    spent: Mapping[str, Spent] | None = None,
    dialects: Sequence[Dialect] = DIALECTS,
    host: str = "127.0.0.1",
    port: int | None = None,
    secret: bytes | None = None,
    folder: Path | None = None,
) -> ServedModels:
    """Start a backend, if there is a policy to sample from, and the gateway; `stack` stops them in reverse order. The
    backend may leave logs in `folder`. `spent` is what the run has asked of other providers before.

    Raises ModelError, ConfigError or GatewayError; what had been started by then is the stack's to stop.
    """
    check_port("gateway", host, port, GatewayError)
    calls = CallSettings() if policy is None else policy.calls
    served: dict[str, Model] = dict(models or {})
    backend = rendering = None
    alias = POLICY
    if policy is not None:
        if folder is not None:
            policy = replace(policy, model=replace(policy.model, folder=str(folder)))
        backend, rendering = await start_backend(stack, policy)
        alias, *others = policy.model.trained
        served |= {name: Trained(backend.engine(name), rendering) for name in others}
        served |= {name: Frozen(backend.engine(name), rendering) for name in policy.model.members}
        if policy.model.frozen is not None:
            served[policy.model.frozen] = Frozen(backend.engine(policy.model.frozen), rendering)
    gateway = Gateway(
        store,
        None if backend is None else backend.engine(alias),
        rendering,
        policy=alias,
        models=served,
        any_model_name=any_model_name,
        spent=spent,
        dialects=dialects,
        host=host,
        port=port or 0,
        secret=secret,
        train_sampling={name: getattr(calls, name) for name in ("temperature", "top_p", "top_k", "min_p")},
        val_sampling={"temperature": calls.val_temperature},
        train_agents=calls.train_agents,
        train_prompts=calls.train_prompts,
        max_calls=calls.max_calls,
        max_tokens=calls.max_tokens,
        cut_long_prompts=calls.cut_long_prompts,
        filter_replay=calls.filter_replay,
        strict_requests=calls.strict_requests,
    )
    await gateway.start()
    stack.push_async_callback(gateway.stop)
    val_sampling = {} if calls.val_temperature is None else {"temperature": calls.val_temperature}
    return ServedModels(gateway, backend, tuple(served), {"temperature": calls.temperature}, val_sampling)


async def start_backend(stack: AsyncExitStack, policy: PolicySpec) -> tuple[Backend, Any]:
    """The backend, started, and how its model's messages become tokens."""
    try:
        from agentlightning.rendering import doubt_about, load_rendering

        read_shape(policy.model.model)  # a name that is nowhere is answered at once, and in words
        path, renderer = resolve_model(policy.model.model), policy.calls.renderer
        rendering = load_rendering(path, renderer)
        if renderer is not None and (doubt := doubt_about(path, renderer)) is not None:
            logger.warning("%s", doubt)
        backend = make_backend(policy.backend, policy.model)
    except ModuleNotFoundError as error:
        raise missing_extra("torch", error.name or "torch") from error
    stack.push_async_callback(backend.close)
    await backend.start()
    return backend, rendering


async def forget_old_requests(store: SqlLightningStore) -> None:
    """Keep a server's store small, until this is cancelled: every request is recorded in a temporary file, and one that
    runs for months must not fill the disk with it.
    """
    while True:
        await asyncio.sleep(PRUNE_SECONDS)
        await store.prune(keep=KEPT_REQUESTS)
