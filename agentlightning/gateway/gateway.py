"""`Gateway`: the object that owns what a gateway is made of, and its life from start to stop.

Also known as `LLMProxy`. It runs in the caller's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

from agentlightning.arguments import explained_class
from agentlightning.engine.base import Engine
from agentlightning.errors import ConfigError, ConflictError, GatewayError, NotFoundError
from agentlightning.gateway.attempts import Attempts, AttemptSummary, LiveAttempt
from agentlightning.gateway.dialects import DIALECTS, Dialect
from agentlightning.gateway.exchange import Refusal
from agentlightning.gateway.history.memory import SessionBudget, Shared
from agentlightning.gateway.history.restore import restore
from agentlightning.gateway.history.session import Session
from agentlightning.gateway.large.requests import LargeRequests
from agentlightning.gateway.large.wire import Measure
from agentlightning.gateway.limits import RequestLimits, freeze_heap
from agentlightning.gateway.recording.journal import CallJournal
from agentlightning.gateway.recording.recorder import Recorder
from agentlightning.gateway.routing.models import AttemptLimits, Frozen, Model, Selection, Trained, check_models
from agentlightning.gateway.routing.spending import Account
from agentlightning.gateway.routing.upstream import Provider, Upstream
from agentlightning.gateway.sampling.sampler import Sampler
from agentlightning.gateway.sampling.settings import Overrides, check_overrides
from agentlightning.gateway.serving.answering import Target
from agentlightning.gateway.serving.app import GatewayApp
from agentlightning.gateway.serving.attempt_api import AttemptApi
from agentlightning.gateway.serving.http import Receive, Scope, Send
from agentlightning.keys import (
    ALL_SCOPES,
    SECRET,
    new_secret,
    not_empty,
    sign_attempt_key,
    sign_url_key,
    verify_attempt_key,
)
from agentlightning.net.server import Busy, ConnectionLimits, LoopServer
from agentlightning.rendering import Rendering
from agentlightning.rendering.messages import Message
from agentlightning.store.base import LightningStore
from agentlightning.types import LLM, AttemptStatus, Outcome, ProxyLLM
from agentlightning.types.call import Spent
from agentlightning.types.ids import random_hex

logger = logging.getLogger(__name__)

_ANOTHER = (
    "The gateway that served this attempt is gone, and another one has taken its place, which cannot say whether all "
    "of its calls were stored."
)
_DIED = "The gateway died with answers of this attempt that were not stored yet."
_SWEEP_SECONDS = 60.0
_GRACE_SECONDS = 2.0
"""How long calls may go on when the gateway stops; less than the server itself waits."""


@explained_class
class Gateway:
    """What agents talk to: speaks their wire formats, keeps exact token history, samples, records calls."""

    def __init__(
        self,
        store: LightningStore,
        engine: Engine | None,
        rendering: Rendering | None,
        *,
        policy: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        secret: bytes | None = None,
        train_sampling: Mapping[str, Any] | None = None,
        val_sampling: Mapping[str, Any] | None = None,
        train_agents: str | None = None,
        train_prompts: str | None = None,
        max_calls: int | None = None,
        max_tokens: int | None = None,
        models: Mapping[str, Model] | None = None,
        any_model_name: bool = False,
        spent: Mapping[str, Spent] | None = None,
        dialects: Sequence[Dialect] = DIALECTS,
        rerender: bool = False,
        cut_long_prompts: bool = False,
        filter_replay: bool = False,
        strict_requests: bool = False,
        idle_seconds: float = 3600.0,
        keep_alive_seconds: float = 10.0,
        read_seconds: float = 60.0,
        request_limits: RequestLimits | None = None,
        connection_limits: ConnectionLimits | None = None,
        allow_hosts: Sequence[str] = (),
        journal: str | Path | None = None,
    ) -> None:
        """A gateway, not started yet.

        Args:
            engine: What samples from the policy; None if there is none and only `models` are served.
            rendering: How messages become the policy's tokens and back; None with `engine=None`.
            policy: The alias by which clients name the model.
            host: The address to listen on; this machine only unless told otherwise.
            port: 0 picks a free one.
            secret: Signs the attempts' keys. Give one that outlives this process if agents shall survive a restart.
            train_sampling: Sampling settings that win over the agent's own in train mode, for example
                {"temperature": 1.0}.
            val_sampling: The same for rollouts of the other modes, where the agent's own settings hold otherwise.
            train_agents: A regular expression; only calls of agents whose name it finds something in are trained.
            train_prompts: A regular expression; only calls whose system prompt it finds something in are trained.
            max_calls: How many requests an attempt may make.
            max_tokens: How many tokens an attempt may have sampled.
            models: Other models by alias: a `Provider`, a `Frozen` engine, another policy (`Trained`), or another
                name for one that exists.
            any_model_name: Where only one model is served, let every name mean it, also one that was never given.
            spent: What was asked of other providers before, by alias; it counts towards their limits for all
                rollouts.
            dialects: The wire formats that are spoken; `(*DIALECTS, MyDialect())` adds one of your own.
            rerender: Render every prompt anew, as a plain server would, instead of continuing the sampled tokens.
            cut_long_prompts: Shorten prompts that do not fit the policy's context (its oldest tool results, then
                its oldest messages) instead of refusing them as a provider does, for agents that cannot handle that
                error.
            filter_replay: Record of training calls which tokens `top_p`, `top_k` and `min_p` left to draw from, where
                the engine says so; what learns from the calls then takes its log-probs over the same tokens.
            strict_requests: Refuse requests of which something would be left out (unknown fields, tools that a
                provider runs), by its name, instead of answering them without it.
            idle_seconds: How long the session of an attempt that makes no calls is kept in memory.
            keep_alive_seconds: How long a stream may be silent before a comment is sent, so that nobody gives it
                up.
            read_seconds: How long a client may take to send a request.
            request_limits: How large one request may be, and how many an attempt may have open.
            connection_limits: How long a client may take for the head of a request, and how many may be connected.
            allow_hosts: Names of this machine that agents ask for the gateway by and that it cannot know itself.
            journal: A file that outlives this process. With it, and the same secret, store and port, the next
                gateway lets attempts go on where they were, but for those whose last answers were not stored, which
                are done again.
        """
        if not policy:
            raise ConfigError("A policy needs a name: give policy='…'.")
        if (engine is None) != (rendering is None):
            raise ConfigError("An engine needs a rendering, and a rendering an engine; give both or neither.")
        self._engine = engine
        self._rendering = rendering
        self._policy = policy
        self._host = host
        self._secret = not_empty(secret, SECRET) or new_secret()
        self._overrides = Overrides(
            train=check_overrides("train_sampling", train_sampling), other=check_overrides("val_sampling", val_sampling)
        )
        self._selection = Selection.of(train_agents, train_prompts)
        self._limits = AttemptLimits(max_calls, max_tokens)
        self._models = self._check(models or {})
        self._any_model_name = any_model_name
        self._rerender = rerender
        self._cut_long_prompts = cut_long_prompts
        self._filter_replay = filter_replay
        self._large = LargeRequests(request_limits or RequestLimits())
        self._memory = Shared(self._large.limits.history_total_bytes)
        self._attempts = Attempts(store, self._session, self._restore, self._memory, idle_seconds=idle_seconds)
        self._journal = None if journal is None else CallJournal(journal)
        self._recorder = Recorder(store, self._attempts.mark_lost, self._journal)
        self._store = store
        self._instance = random_hex(8)
        self._samplers: dict[str, Sampler] = {}
        self._upstreams: dict[str, Upstream] = {}
        self._spent = dict(spent or {})
        connections = connection_limits or ConnectionLimits()
        api = AttemptApi(self._attempts, self._recorder, self.close_attempt)
        self._app = GatewayApp(
            self._attempts,
            self,
            self._recorder,
            api,
            self._large,
            self._secret,
            busy=Busy(connections),
            dialects=dialects,
            keep_alive_seconds=keep_alive_seconds,
            read_seconds=read_seconds,
            instance=lambda: self._instance,
            strict=strict_requests,
        )
        self._server = LoopServer(
            self._app,
            self._host,
            port,
            what="gateway",
            error=GatewayError,
            limits=connections,
            trusted=self._app.trusts,
            allow_hosts=allow_hosts,
        )
        self._sweeper: asyncio.Task[None] | None = None

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Ask the engines what they serve, and listen. Raises `GatewayError` if the port is taken."""
        if self._sweeper is not None:
            raise GatewayError("This gateway has already been started.")
        if self._engine is not None and self._rendering is not None:
            sampler = await self._make_sampler(self._policy, self._engine, self._rendering, trained=True)
            self._samplers = {self._policy: sampler, sampler.model: sampler}
        await self.update_model_list(self._models)
        if not self.names():
            raise ConfigError("The gateway has nothing to serve: give it an engine, or models.")
        freeze_heap()
        if self._journal is not None:
            await self._continue(self._journal)
        await self._server.start()
        self._recorder.start()
        self._sweeper = asyncio.create_task(self._sweep(), name="gateway-sweeper")
        logger.info("The gateway serves %s at %s", ", ".join(self.names()), self.endpoint)

    async def stop(self, timeout: float = 30.0) -> None:
        """Finish requests, write what is recorded (for at most `timeout` seconds), and close. Idempotent."""
        if self._sweeper is None:
            return
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, return_exceptions=True)
        stopping = asyncio.create_task(self._server.stop())
        await asyncio.wait([stopping], timeout=_GRACE_SECONDS)
        await self._attempts.end_calls("the gateway was stopped")
        await stopping
        await asyncio.gather(*[upstream.close() for upstream in self._upstreams.values()])
        await self._large.close()
        await self._recorder.stop(timeout)
        if self._journal is not None:
            self._journal.close()
        self._sweeper = None

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The gateway as an ASGI application, for another server in front of it."""
        await self._app(scope, receive, send)

    def dialect_of(self, path: str, query: str) -> Dialect | None:
        """The wire format of the calls that are sent there; None if none are."""
        return self._app.dialect_of(path, query)

    def trusts(self, scope: Scope) -> bool:
        """Whether a request is a runner's, or asks for health: those have connections in reserve."""
        return self._app.trusts(scope)

    async def _continue(self, journal: CallJournal) -> None:
        """Take over from the gateway that used the journal: the attempts that it lost answers of are done again.

        Nobody can finish them before: that takes a gateway.
        """
        self._instance, unstored = journal.open()
        for rollout_id, attempt_id in unstored:
            with suppress(NotFoundError, ConflictError):  # it is over, or given up already
                await self._store.update_attempt(
                    rollout_id, attempt_id, status=AttemptStatus.FAILED, outcome=Outcome.INFRA_ERROR, error=_DIED
                )
        if unstored:
            logger.warning("%d attempts are done again: the last gateway died with answers of theirs.", len(unstored))
        journal.settle()

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

    def key_for(self, rollout_id: str, attempt_id: str, scopes: Sequence[str] = ALL_SCOPES) -> str:
        """The API key that opens this attempt and no other; see `agentlightning.keys` for the scopes."""
        return sign_attempt_key(self._secret, rollout_id, attempt_id, scopes)

    def opens(self, key: str) -> bool:
        """Whether it is the key of an attempt here."""
        return verify_attempt_key(self._secret, key) is not None

    def bind(self, resource: ProxyLLM, rollout_id: str, attempt_id: str, scopes: Sequence[str] = ALL_SCOPES) -> LLM:
        """The resource as an agent is given it: its URL is enough, and is good for one attempt only, like its key."""
        url_key = sign_url_key(self._secret, rollout_id, attempt_id, scopes)
        return resource.for_attempt(rollout_id, attempt_id, self.key_for(rollout_id, attempt_id, scopes), url_key)

    # ---- what the runner asks --------------------------------------------------------------------------------------

    @property
    def instance(self) -> str:
        """Names what this gateway remembers: another one is another name, and knows nothing of this one's answers."""
        return self._instance

    async def open_attempt(self, rollout_id: str, attempt_id: str) -> None:
        """Nothing to do: a runner that holds this object does not outlive it. See `runner.remote.RemoteGateway`."""

    async def close_attempt(
        self, rollout_id: str, attempt_id: str, timeout: float = 60.0, *, opened_at: str | None = None
    ) -> AttemptSummary:
        """End the attempt's open calls, wait until all of its calls are stored, and forget its session.

        `opened_at` is the `instance` that the attempt began at: if it is another one, the summary says that calls may
        be lost. Raises `StoreError` if the store does not take them within `timeout` seconds. Idempotent.
        """
        await self._attempts.close(rollout_id, attempt_id)
        await self._recorder.barrier(timeout)
        if opened_at is not None and opened_at != self._instance:
            self._attempts.mark_lost(rollout_id, attempt_id, _ANOTHER)
        return self._attempts.summary(rollout_id, attempt_id)

    async def stored(self, timeout: float = _GRACE_SECONDS) -> None:
        """Wait until the calls answered so far are in the store. Raises `StoreError` after `timeout` seconds."""
        await self._recorder.barrier(timeout)

    def goes_on(self, rollout_id: str, attempt_id: str, answered: MutableMapping[str, list[Message]]) -> None:
        """Let the requests of an attempt refer to these answers by their ids, and add its own to them."""
        self._attempts.goes_on(rollout_id, attempt_id, answered)

    def open_calls(self, rollout_id: str, attempt_id: str) -> int:
        """How many requests of the attempt are being answered right now."""
        return self._attempts.open_calls(rollout_id, attempt_id)

    def warn_with(self, warn: Callable[[str], None]) -> None:
        """Have `warn` called, once for each part of requests that the model does not get, and nothing logged of it."""
        self._app.warn_with(warn)

    @property
    def refused_requests(self) -> Mapping[str, int]:
        """How many requests belonged to no attempt, by why they were refused."""
        return self._app.refused_requests

    @property
    def spent(self) -> dict[str, Spent]:
        """What was asked of other providers so far, by alias."""
        return {**self._spent, **{alias: upstream.account.total for alias, upstream in self._upstreams.items()}}

    def say_trouble(self, reason: str | None) -> None:
        """Let `/health` answer 503 with this reason; None: all is well again."""
        self._app.trouble = reason

    # ---- routing ---------------------------------------------------------------------------------------------------

    async def update_model_list(self, models: Mapping[str, Model]) -> None:
        """What clients may name besides the policy, from now on. Names that are not given any more are gone."""
        self._models = self._check(models)
        policy = self._samplers.get(self._policy)
        samplers = {self._policy: policy, policy.model: policy} if policy is not None else {}
        upstreams: dict[str, Upstream] = {}
        for alias, model in self._models.items():
            if isinstance(model, Frozen | Trained):
                trained = isinstance(model, Trained)
                samplers[alias] = await self._make_sampler(alias, model.engine, model.rendering, trained=trained)
            elif isinstance(model, Provider):
                account = Account(alias, self._store, model.price, model.limits, self.spent.get(alias, Spent()))
                upstreams[alias] = Upstream(alias, model, self._recorder, account)
        self._spent = self.spent
        retired, self._samplers, self._upstreams = self._upstreams, samplers, upstreams
        await asyncio.gather(*[upstream.close() for upstream in retired.values()])

    def _check(self, models: Mapping[str, Model]) -> dict[str, Model]:
        return check_models(models, None if self._engine is None else self._policy)

    def target(self, model: str) -> Target | Upstream:
        """What a model's name means. Raises `Refusal` if it means nothing here."""
        meant = self._models.get(model)
        name = meant if isinstance(meant, str) else model
        found = self._samplers.get(name) or self._upstreams.get(name)
        if found is None:
            raise Refusal(
                f"The model '{model[:200]}' does not exist here. Ask for the one that the agent is given, "
                f"model=llm.model (of a program: $OPENAI_MODEL); there are: {', '.join(self.names())}. Another model, "
                "such as a judge, is given to the run: models={'judge': agl.Provider(base_url=…, api_key=…)}, "
                "or --upstream judge=URL.",
                status=404,
                code="model_not_found",
                param="model",
            )
        return found

    def measures(self) -> Mapping[str, Measure]:
        """What the length of requests is checked by, by all names of the models that are sampled from here."""
        meant = {name: self._samplers.get(name) for name in self._samplers}
        meant |= {alias: self._samplers.get(name) for alias, name in self._models.items() if isinstance(name, str)}
        found = {name: None if sampler is None else sampler.measure for name, sampler in meant.items()}
        return {name: measure for name, measure in found.items() if measure is not None}

    def names(self) -> Sequence[str]:
        """The models that clients may name. The directory of a model on this machine is none of their business."""
        return [name for name in dict.fromkeys([*self._samplers, *self._models]) if not PurePath(name).is_absolute()]

    @property
    def takes_any_name(self) -> bool:
        """Whether a name that was never given means the only model that is served."""
        served = {id(model) for model in (*self._samplers.values(), *self._upstreams.values())}
        return self._any_model_name and len(served) == 1

    async def _make_sampler(self, name: str, engine: Engine, rendering: Rendering, *, trained: bool) -> Sampler:
        return Sampler(
            engine,
            await engine.info(),
            rendering,
            self._recorder,
            self._large,
            policy=name,
            trained=trained,
            selection=self._selection,
            limits=self._limits if trained else AttemptLimits(),
            overrides=self._overrides if trained else Overrides(),
            cut_long_prompts=self._cut_long_prompts,
            filter_replay=trained and self._filter_replay,
        )

    def _session(self, name: str) -> Session:
        model = self._models.get(name)
        rendering = model.rendering if isinstance(model, Frozen | Trained) else self._rendering
        assert rendering is not None, "only samplers have sessions"
        limits = self._large.limits
        budget = SessionBudget(limits.history_messages, limits.history_bytes)
        return Session(rendering, rerender=self._rerender, budget=budget, shared=self._memory)

    async def _restore(self, live: LiveAttempt, only: str | None) -> None:
        if only is not None:
            await self._recorder.barrier(_GRACE_SECONDS)
        await restore(self._store, live, only)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            try:
                await self._attempts.forget_idle()
            except Exception:  # whatever a store raises: sessions must be forgotten for as long as there are any
                logger.exception("Looking for attempts that are over failed; it is tried again.")
