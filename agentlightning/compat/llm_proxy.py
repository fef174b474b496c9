"""`LLMProxy`: a gateway in front of other providers, from a list of models as LiteLLM writes them. It has no engine.

What it takes is turned into `Gateway(models={alias: Provider(…)})`; what has no meaning there is said, what would be
missed is refused. On loopback it asks for no keys, as in 0.3: an attempt's URL is `…/rollout/{id}/attempt/{id}/v1`, and
requests that belong to no rollout are recorded as attempts of their own.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from typing_extensions import TypedDict

from agentlightning.compat.notice import use
from agentlightning.compat.row import Old
from agentlightning.errors import ConfigError, GatewayError, StoreError
from agentlightning.gateway import AttemptSummary, Gateway, Provider
from agentlightning.gateway.serving.anonymous import AnonymousAccess
from agentlightning.keys import ALL_SCOPES, CALLS, PREFIX, new_secret
from agentlightning.net.guard import is_local_name
from agentlightning.net.server import LoopServer
from agentlightning.store.base import LightningStore
from agentlightning.types import LLM, ProxyLLM

logger = logging.getLogger(__name__)


class ModelConfig(TypedDict):
    """An entry of LiteLLM's model list."""

    model_name: str
    litellm_params: dict[str, Any]


_HOMES = {
    "openai": ("https://api.openai.com/v1", "OPENAI_BASE_URL", "OPENAI_API_KEY"),
    "anthropic": ("https://api.anthropic.com/v1", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"),
}
"""Providers whose address is known: it, and the environment variables of address and key."""
_LISTED = ("hosted_vllm", "openai_like", "litellm_proxy", "text-completion-openai")
"""Providers that say their address."""
_TOKEN_IDS = {"return_token_ids": True}
"""Asked of vLLM, as 0.3 did by default."""
_READ = ("model", "api_base", "base_url", "api_key", "timeout", "extra_headers", "extra_body", "max_parallel_requests")
_KEYS = (b"authorization", b"x-api-key", b"x-goog-api-key")
_OLDER_PARTS = {
    "middlewares": ("rollout_attempt", "stream_conversion", "message_inspection"),
    "callbacks": ("return_token_ids", "opentelemetry", "logprobs"),
}
"""What 0.3 had under these words by name, and the gateway does by itself."""
_NO_MEANING = {
    "num_retries": "the agent's client retries",
    "num_workers": "it runs in the event loop that starts it",
    "launch_mode": "it runs in the event loop that starts it",
    "launcher_args": "it runs in the event loop that starts it",
    "litellm_config": "there is no LiteLLM inside",
    "middlewares": "calls are attributed without",
    "callbacks": "calls are recorded without",
}


def provider_of(entry: ModelConfig) -> Provider:
    """Where an entry of the list leads. Raises ConfigError for one that cannot be followed."""
    alias, params = entry["model_name"], entry["litellm_params"]
    unknown = [name for name in params if name not in _READ]
    if unknown:
        raise ConfigError(
            f"The model '{alias}' has {', '.join(sorted(unknown))} in litellm_params, which this proxy does not set. "
            f"Let the agent send it; here one gives {', '.join(_READ)}."
        )
    if "*" in alias:
        raise ConfigError(f"The model '{alias}' stands for many; give each model an entry of its own.")
    kind, slash, model = str(params["model"]).partition("/")
    if not slash or kind not in (*_HOMES, *_LISTED):
        kind, model = "openai" if not slash else kind, str(params["model"]).partition("/")[2] or str(params["model"])
    url = params.get("api_base") or params.get("base_url")
    key = params.get("api_key")
    if kind in _HOMES:
        home, url_name, key_name = _HOMES[kind]
        url = url or os.environ.get(url_name) or home
        key = key or os.environ.get(key_name)
    if not url:
        raise ConfigError(
            f"The model '{alias}' is of '{kind}', whose address is not known. Give api_base: the base URL of a server "
            "that speaks OpenAI's or Anthropic's API."
        )
    return Provider(
        base_url=_value(url),
        api_key=_value(key) if key else None,
        model=model,
        timeout_seconds=float(params.get("timeout") or 600.0),
        max_concurrency=int(params.get("max_parallel_requests") or 64),
        headers=dict(params.get("extra_headers") or {}),
        extra_body={**(_TOKEN_IDS if kind == "hosted_vllm" else {}), **(params.get("extra_body") or {})},
    )


def _value(text: str) -> str:
    """What is written, or the environment variable it names as `os.environ/NAME`."""
    if not text.startswith("os.environ/"):
        return text
    name = text.removeprefix("os.environ/")
    if name not in os.environ:
        raise ConfigError(f"The model list reads the environment variable {name}, which is not set.")
    return os.environ[name]


_ATTEMPT = re.compile(r"/rollout/(?P<rollout>[^/]+)/attempt/(?P<attempt>[^/]+)(?!/key/)/.*")


class _WithoutKeys:
    """The gateway as an ASGI application for clients that were given URLs of attempts without their keys, or none."""

    def __init__(self, gateway: Gateway, store: LightningStore) -> None:
        self._gateway = gateway
        self._anybody = AnonymousAccess(gateway, store, None)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        attempt = _ATTEMPT.fullmatch(path)
        if attempt is not None:
            key = self._gateway.key_for(attempt["rollout"], attempt["attempt"], (CALLS,))
            others = [(name, value) for name, value in scope["headers"] if not _ours(name, value)]
            headers = scope["headers"] if len(others) < len(scope["headers"]) else _signed(others, key)
            await self._gateway.app({**scope, "headers": headers}, receive, send)
        elif "/rollout/" in path or path.startswith("/key/"):
            await self._gateway.app(scope, receive, send)
        else:
            await self._anybody(scope, receive, send)


class _Stored:
    """An application whose answers end when their calls are in the store, where scripts look for them at once."""

    def __init__(self, gateway: Gateway, app: Any) -> None:
        self._gateway, self._app = gateway, app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_stored(message: Any) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                with suppress(StoreError):  # the call is kept and written when the store is there again
                    await self._gateway.stored()
            await send(message)

        await self._app(scope, receive, send_stored)


def _ours(name: bytes, value: bytes) -> bool:
    """Whether a header is an attempt's key."""
    return name in _KEYS and value.removeprefix(b"Bearer ").strip().startswith(PREFIX.encode())


def _signed(headers: Sequence[tuple[bytes, bytes]], key: str) -> list[tuple[bytes, bytes]]:
    others = [(name, value) for name, value in headers if name not in _KEYS]
    return [*others, (b"authorization", b"Bearer " + key.encode())]


def _refuse_own_code(name: str, parts: Any) -> None:
    """Raises ConfigError for a middleware or callback of the script's own, which would never run."""
    for part in (parts or ()) if name in _OLDER_PARTS else ():
        if part not in _OLDER_PARTS[name]:
            raise ConfigError(
                f"LLMProxy({name}=) has {part!r}, which is code of LiteLLM's kind, and there is no LiteLLM inside. "
                "What it should see is in the store: each call is a span with its request and its answer."
            )


class LLMProxy:
    """Started and stopped in the event loop that uses it; a trainer that is given one starts it itself."""

    def __init__(
        self,
        port: int | None = None,
        model_list: Sequence[ModelConfig] | None = None,
        store: LightningStore | None = None,
        host: str | None = None,
        **older: Any,
    ) -> None:
        for name in older:
            if name not in _NO_MEANING:
                raise TypeError(f"LLMProxy() got an unexpected keyword argument '{name}'")
            _refuse_own_code(name, older[name])
            use(Old(f"agentlightning:LLMProxy({name}=)", "", _NO_MEANING[name]))
        self.port = port or _free_port()
        self.host = host or "127.0.0.1"
        self.store = store
        self._secret = new_secret()
        self._models: dict[str, Provider] = {}
        self._list: list[ModelConfig] = []
        self._read(model_list or (older.get("litellm_config") or {}).get("model_list") or [])
        self._gateway: Gateway | None = None
        self._front: LoopServer | None = None

    def _read(self, model_list: Sequence[ModelConfig]) -> None:
        self._list = list(model_list)
        self._models = {entry["model_name"]: provider_of(entry) for entry in model_list}

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen. Raises ConfigError without a store or a model, GatewayError if the port is taken."""
        if self._gateway is not None:
            return
        if self.store is None:
            raise ConfigError("The LLMProxy has no store to record in; give LLMProxy(store=…), or call set_store.")
        gateway = Gateway(self.store, None, None, secret=self._secret, models=self._models)
        await gateway.start()
        app = _WithoutKeys(gateway, self.store) if is_local_name(self.host) else gateway.app
        front = LoopServer(_Stored(gateway, app), self.host, self.port, what="LLMProxy", error=GatewayError)
        try:
            await front.start()
        except GatewayError:
            await gateway.stop()
            raise
        self._gateway, self._front = gateway, front
        logger.info("The LLMProxy serves agents at %s", self.endpoint)

    async def stop(self) -> None:
        """Idempotent."""
        gateway, front, self._gateway, self._front = self._gateway, self._front, None, None
        if gateway is not None and front is not None:
            await front.stop()
            await gateway.stop()

    async def restart(self, *, _port: int | None = None) -> None:
        """Stop, and start again with what was set since."""
        await self.stop()
        self.port = _port or self.port
        await self.start()

    def is_running(self) -> bool:
        """Whether it listens."""
        return self._gateway is not None

    def initialize(self) -> None:
        """Nothing is patched; there is nothing to do."""

    async def __aenter__(self) -> LLMProxy:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # ---- settings --------------------------------------------------------------------------------------------------

    def set_store(self, store: LightningStore) -> None:
        """Record in this store from the next start on."""
        self.store = store

    def get_store(self) -> LightningStore | None:
        """Where it records."""
        return self.store

    def update_model_list(self, model_list: Sequence[ModelConfig]) -> None:
        """Serve these models instead, from the next start or restart on."""
        self._read(model_list)

    # ---- what agents are given -------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """The plain base URL."""
        return f"http://{self.host}:{self.port}/v1"

    @property
    def models(self) -> Mapping[str, Provider]:
        """Where each alias leads."""
        return dict(self._models)

    def as_resource(
        self,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        model: str | None = None,
        sampling_parameters: dict[str, Any] | None = None,
    ) -> LLM:
        """A `ProxyLLM` for rollouts; with both ids the `LLM` of that attempt. `model` may be left out if there is one.

        Raises ValueError where it is not clear which model is meant, or for one id without the other.
        """
        if model is None:
            if len(self._models) != 1:
                raise ValueError(f"Say which model is meant: model= one of {', '.join(self._models) or '(none)'}.")
            model = next(iter(self._models))
        proxy = ProxyLLM(endpoint=self.endpoint, model=model, sampling_parameters=sampling_parameters or {})
        if rollout_id is None and attempt_id is None:
            return proxy
        if rollout_id is None or attempt_id is None:
            raise ValueError("Give both rollout_id and attempt_id, or neither.")
        return self._running().bind(proxy, rollout_id, attempt_id).with_key_in_url()

    # ---- what a runner asks ----------------------------------------------------------------------------------------

    def bind(self, resource: ProxyLLM, rollout_id: str, attempt_id: str, scopes: Sequence[str] = ALL_SCOPES) -> LLM:
        """As `Gateway.bind`."""
        return self._running().bind(resource, rollout_id, attempt_id, scopes)

    @property
    def refused_requests(self) -> Mapping[str, int]:
        """As `Gateway.refused_requests`."""
        return self._running().refused_requests

    async def open_attempt(self, rollout_id: str, attempt_id: str) -> None:
        """As `Gateway.open_attempt`."""
        await self._running().open_attempt(rollout_id, attempt_id)

    async def close_attempt(self, rollout_id: str, attempt_id: str) -> AttemptSummary:
        """As `Gateway.close_attempt`."""
        return await self._running().close_attempt(rollout_id, attempt_id)

    def _running(self) -> Gateway:
        if self._gateway is None:
            raise GatewayError("The LLMProxy does not run: await proxy.start() first.")
        return self._gateway


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
