"""`Gateway`: the object that owns what a gateway is made of, and its life from start to stop.

Also known as `LLMProxy`. It runs in the caller's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from agentlightning.engine.base import Engine
from agentlightning.errors import ConfigError, GatewayError
from agentlightning.gateway.app import GatewayApp, Target
from agentlightning.gateway.attempts import Attempts, AttemptSummary
from agentlightning.gateway.exchange import Refusal
from agentlightning.gateway.recorder import Recorder
from agentlightning.gateway.rendering import Rendering
from agentlightning.gateway.restore import restore
from agentlightning.gateway.sampler import Sampler
from agentlightning.gateway.sampling import check_overrides
from agentlightning.gateway.server import LoopServer
from agentlightning.gateway.session import Session
from agentlightning.keys import new_secret, sign_attempt_key
from agentlightning.store.base import LightningStore
from agentlightning.types import ProxyLLM

logger = logging.getLogger(__name__)

_SWEEP_SECONDS = 60.0


class Gateway:
    """What agents talk to: speaks their wire formats, keeps exact token history, samples from the engine, records
    calls.
    """

    def __init__(
        self,
        store: LightningStore,
        engine: Engine,
        rendering: Rendering,
        *,
        policy: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        secret: bytes | None = None,
        train_sampling: Mapping[str, Any] | None = None,
        rerender: bool = False,
        idle_seconds: float = 3600.0,
    ) -> None:
        """
        policy: the alias by which clients name the model.
        secret: signs the attempts' keys. Give one that outlives this process if agents shall survive a restart.
        train_sampling: sampling settings that win over the agent's own in train mode, for example {"temperature": 1.0}.
        rerender: render every prompt anew, as a plain server would, instead of continuing the sampled tokens.
        idle_seconds: how long the session of an attempt that makes no calls is kept in memory.
        """
        if not policy:
            raise ConfigError("A policy needs a name: give policy='…'.")
        self._store = store
        self._engine = engine
        self._rendering = rendering
        self._policy = policy
        self._host = host
        self._secret = new_secret() if secret is None else secret
        self._train_sampling = check_overrides(train_sampling)
        self._recorder = Recorder(store)
        self._attempts = Attempts(
            store,
            lambda: Session(rendering, rerender=rerender),
            lambda live: restore(store, live),
            idle_seconds=idle_seconds,
        )
        self._targets: dict[str, Target] = {}
        self.app = GatewayApp(self._attempts, self, self._recorder.admit, self._secret)
        """The ASGI application, for a front of one's own."""
        self._server = LoopServer(self.app, self._host, port)
        self._sweeper: asyncio.Task[None] | None = None

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Ask the engine what it serves, and listen. Raises `GatewayError` if the port is taken."""
        if self._sweeper is not None:
            raise GatewayError("This gateway has already been started.")
        info = await self._engine.info()
        sampler = Sampler(
            self._engine,
            info,
            self._rendering,
            self._recorder,
            policy=self._policy,
            train_sampling=self._train_sampling,
        )
        self._targets = {self._policy: sampler, info.model: sampler}
        await self._server.start()
        self._recorder.start()
        self._sweeper = asyncio.create_task(self._sweep(), name="gateway-sweeper")
        logger.info("The gateway serves '%s' (%s) at %s", self._policy, info.model, self.endpoint)

    async def stop(self, timeout: float = 30.0) -> None:
        """Finish requests, write what is recorded (for at most `timeout` seconds), and close. Idempotent."""
        if self._sweeper is None:
            return
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, return_exceptions=True)
        await self._server.stop()
        await self._recorder.stop(timeout)
        self._sweeper = None

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # ---- what agents are given -------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """The plain base URL, `http://host:port/v1`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.port}/v1"

    def as_resource(self, model: str | None = None, sampling_parameters: dict[str, Any] | None = None) -> ProxyLLM:
        """The gateway as a resource for rollouts; `model` is the policy's alias unless told otherwise."""
        return ProxyLLM(
            endpoint=self.endpoint, model=model or self._policy, sampling_parameters=sampling_parameters or {}
        )

    def key_for(self, rollout_id: str, attempt_id: str) -> str:
        """The API key that opens this attempt and no other."""
        return sign_attempt_key(self._secret, rollout_id, attempt_id)

    # ---- what the runner asks --------------------------------------------------------------------------------------

    async def close_attempt(self, rollout_id: str, attempt_id: str, timeout: float = 60.0) -> AttemptSummary:
        """End the attempt's open calls, wait until all of its calls are stored, and forget its session.

        Raises `StoreError` if the store does not take them within `timeout` seconds. Idempotent.
        """
        summary = await self._attempts.close(rollout_id, attempt_id)
        await self._recorder.barrier(timeout)
        return summary

    def call_count(self, rollout_id: str, attempt_id: str) -> int:
        """How many responses were sampled for an attempt; also after it was closed (of the last few thousand)."""
        return self._attempts.summary(rollout_id, attempt_id).calls

    # ---- routing ---------------------------------------------------------------------------------------------------

    def target(self, model: str) -> Target:
        found = self._targets.get(model)
        if found is None:
            raise Refusal(
                f"The model '{model}' does not exist here. Use one of: {', '.join(self._targets)}.",
                status=404,
                code="model_not_found",
                param="model",
            )
        return found

    def names(self) -> Sequence[str]:
        return list(self._targets)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self._attempts.forget_idle()
