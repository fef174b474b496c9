"""The claim-run-report loop. One runner executes many rollouts at once and never lets one of them stop the others.

What the agent does ends as data: a reward, or an outcome with its message. What the agent never does is decide what the
algorithm makes of it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import reprlib
import socket
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.arguments import explained_class
from agentlightning.emitter import emit_reward
from agentlightning.errors import (
    AgentError,
    ConfigError,
    ConflictError,
    DeadlineError,
    ExecutorError,
    JudgeError,
    RewardError,
    StoreClosedError,
    StoreError,
    StoreUnavailableError,
)
from agentlightning.litagent import LitAgent
from agentlightning.litagent.litagent import GivenResources
from agentlightning.runner.air import air
from agentlightning.runner.endings import Ending, GatewaySummary, close_unawaited, describe, storable, with_gateway
from agentlightning.runner.executor import agent_loop, run_in_thread, same_folder
from agentlightning.runner.presence import Presence, RunningAttempt
from agentlightning.runner.tracing import opened_trace
from agentlightning.store.base import LightningStore
from agentlightning.store.operations.codec import encode_seen
from agentlightning.tracer import GatewayAccess, OtelTracer, ToolReplay, Trace, Tracer, current_agent_name, instrument
from agentlightning.types import (
    DEFAULT_TIMEOUT_SECONDS,
    LLM,
    AttemptedRollout,
    AttemptStatus,
    Hook,
    NamedResources,
    Outcome,
    ProxyLLM,
    RolloutMode,
    Span,
    Triplet,
)
from agentlightning.types.ids import random_hex
from agentlightning.types.names import REWARD_RESPONSE, REWARDED_LATER, TRIPLET, TRIPLET_JSON
from agentlightning.types.recording import recording_in
from agentlightning.types.reward import find_final_reward, reward_attributes, reward_error
from agentlightning.types.rollout import TIMEOUT_SETTING

logger = logging.getLogger(__name__)

current_runner: ContextVar[LitAgentRunner | None] = ContextVar("agentlightning_runner", default=None)
"""The runner whose rollout this code belongs to."""

CLAIM_SECONDS = 30.0
"""How long one claim waits in the store for work before it is repeated."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 15.0
"""Between two reports of an attempt's end while the store is out of reach."""
HOOK_SECONDS = 60.0
"""How long a hook may take before it is left."""
_NOTHING_IS_DONE = "%s.%s returned %s, which has no effect: a reward is what the agent returns, or emit_reward records."

_STATUS = {
    Outcome.OK: AttemptStatus.SUCCEEDED,
    Outcome.TRUNCATED: AttemptStatus.SUCCEEDED,
    Outcome.AGENT_ERROR: AttemptStatus.FAILED,
    Outcome.INFRA_ERROR: AttemptStatus.FAILED,
    Outcome.JUDGE_ERROR: AttemptStatus.FAILED,
    Outcome.TIMEOUT: AttemptStatus.TIMEOUT,
    Outcome.CANCELLED: AttemptStatus.CANCELLED,
}


class ModelAccess(Protocol):
    """What a runner needs of the gateway."""

    def bind(self, resource: ProxyLLM, rollout_id: str, attempt_id: str, scopes: Sequence[str]) -> LLM:
        """The resource with a URL and a key that are good for one attempt only."""
        ...

    async def open_attempt(self, rollout_id: str, attempt_id: str) -> None:
        """Called when the attempt's resources are bound and its agent has not begun.

        Raises StoreError if the gateway is out of reach.
        """
        ...

    async def close_attempt(self, rollout_id: str, attempt_id: str) -> GatewaySummary:
        """Returns when all calls of the attempt are in the store."""
        ...


@explained_class
class LitAgentRunner:
    """Executes rollouts. `init` gives it the agent, `init_worker` the store; then `step` runs one task, `iter` all."""

    def __init__(
        self,
        tracer: Tracer | None = None,
        max_rollouts: int | None = None,
        *,
        concurrency: int = 64,
        gateway: ModelAccess | None = None,
        run_id: str | None = None,
    ) -> None:
        self._tracer = tracer or OtelTracer()
        self._max_rollouts = max_rollouts
        self._concurrency = concurrency
        self._gateway = gateway
        self._run_id = run_id
        """The run whose rollouts it claims; None: any."""
        self._agent: LitAgent[Any] | None = None
        self._hooks: Sequence[Hook] = ()
        self._store: LightningStore | None = None
        self._presence = Presence()
        self._worker_id = f"{socket.gethostname()}-{os.getpid()}-{random_hex(3)}"

    @property
    def worker_id(self) -> str:
        """The name under which the store knows it."""
        return self._worker_id

    def init(self, agent: LitAgent[Any], hooks: Sequence[Hook] = ()) -> None:
        """Give it the agent to run."""
        self._agent, self._hooks = agent, hooks
        self._tracer.init()
        instrument(current_agent_name)

    def init_worker(self, worker_id: int | str, store: LightningStore) -> None:
        """Give it the store to claim from, and a name or a number of its own."""
        self._store = store
        if isinstance(worker_id, str):
            self._worker_id = worker_id
        self._tracer.init_worker(worker_id if isinstance(worker_id, int) else 0)

    def teardown(self) -> None:
        """Let go of what the tracer holds."""
        self._tracer.teardown_worker(0)
        self._tracer.teardown()

    async def step(
        self, input: Any, resources: NamedResources | None = None, mode: RolloutMode | None = None
    ) -> AttemptedRollout:
        """Run the agent once on `input`, outside any queue, and return the finished rollout.

        Raises what the agent raised; the failed rollout is in the store all the same.
        """
        store = self._ready_store()
        resources_id = (await store.add_resources(resources)).resources_id if resources else None
        claimed = await store.start_rollout(input, mode, resources_id, worker_id=self._worker_id)
        async with self._presence.shown(self._ready_store(), self._worker_id):
            outside = current_runner.set(self)
            try:
                ending = await self._execute(claimed)
            finally:
                current_runner.reset(outside)
        if ending.exception is not None:
            raise ending.exception
        finished = await store.get_rollout_by_id(claimed.rollout_id)
        assert isinstance(finished, AttemptedRollout), finished
        return finished

    async def iter(self, stop: asyncio.Event | None = None) -> None:
        """Claim and run rollouts until `stop` is set or `max_rollouts` are done; then finish what runs.

        Cancelling this task cancels the agents too; their attempts end as cancelled.
        """
        current_runner.set(self)
        stop = stop or asyncio.Event()
        running: set[asyncio.Task[Ending]] = set()
        stopping = asyncio.create_task(stop.wait())
        claimed = 0
        try:
            async with self._presence.shown(self._ready_store(), self._worker_id):
                while not stop.is_set() and (self._max_rollouts is None or claimed < self._max_rollouts):
                    limit = self._concurrency - len(running)
                    if self._max_rollouts is not None:
                        limit = min(limit, self._max_rollouts - claimed)
                    if limit <= 0:
                        await asyncio.wait({*running, stopping}, return_when=asyncio.FIRST_COMPLETED)
                        continue
                    for rollout in await self._claim(limit, stopping):
                        claimed += 1
                        task = asyncio.create_task(self._execute(rollout))
                        running.add(task)
                        task.add_done_callback(running.discard)
                await asyncio.gather(*running)
        finally:
            stopping.cancel()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _claim(self, limit: int, stopping: asyncio.Task[Any]) -> Sequence[AttemptedRollout]:
        """Claim up to `limit` rollouts, or none when the runner is stopped meanwhile."""
        attempt_ids = [f"at-{random_hex(8)}" for _ in range(limit)]
        claim = asyncio.ensure_future(
            self._ready_store().dequeue_many_rollouts(
                limit, self._worker_id, timeout=CLAIM_SECONDS, attempt_ids=attempt_ids, run_id=self._run_id
            )
        )
        try:
            await asyncio.wait({claim, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also when the runner itself is cancelled
            if not claim.done():
                claim.cancel()
                await asyncio.gather(claim, return_exceptions=True)
        if claim.cancelled():
            return ()
        try:
            return claim.result()
        except StoreError as error:
            logger.warning("Claiming work failed, trying again in a second: %s", error)
            await asyncio.sleep(1.0)
            return ()

    async def _execute(self, claimed: AttemptedRollout) -> Ending:
        """Run one attempt from start to its finish in the store."""
        with self._presence.holding(claimed.attempt.attempt_id):
            return await self._run_to_its_end(claimed)

    async def _run_to_its_end(self, claimed: AttemptedRollout) -> Ending:
        agent, store = self._ready_agent(), self._ready_store()
        self._presence.respect(claimed)
        rollout_id, attempt_id = claimed.rollout_id, claimed.attempt.attempt_id
        spans: Sequence[Span] = ()
        interrupted: asyncio.CancelledError | None = None
        try:
            await self._hook("on_rollout_start", agent=agent, runner=self, rollout=claimed)
            async with opened_trace(self._tracer, store, rollout_id, attempt_id) as trace:
                await self._hook("on_trace_start", agent=agent, runner=self, tracer=self._tracer, rollout=claimed)
                ending = await self._run_agent(agent, claimed, trace)
                await self._hook("on_trace_end", agent=agent, runner=self, tracer=self._tracer, rollout=claimed)
            spans = trace.spans
        except asyncio.CancelledError as error:
            ending, interrupted = Ending(Outcome.CANCELLED, "The run was stopped."), error
        except StoreError as error:
            ending = Ending(Outcome.INFRA_ERROR, str(error))
        except Exception as error:  # the tracer may be the user's own
            ending = Ending(Outcome.AGENT_ERROR, f"The tracer failed. {describe(error)}", exception=error)
        await asyncio.shield(self._finish(claimed, ending))
        await self._hook("on_rollout_end", agent=agent, runner=self, rollout=claimed, spans=spans)
        if interrupted is not None:
            raise interrupted
        return ending

    async def _run_agent(self, agent: LitAgent[Any], claimed: AttemptedRollout, trace: Trace) -> Ending:
        """The agent under its deadline; every way it can end becomes an `Ending`."""
        seconds = claimed.config.timeout_seconds or DEFAULT_TIMEOUT_SECONDS
        watched: RunningAttempt | None = None
        try:
            resources = await self._resources(claimed, trace)
            async with asyncio.timeout(seconds) as deadline:
                with self._presence.watching(claimed.rollout_id, deadline) as watched:
                    try:
                        result = await self._call(agent, claimed, resources)
                    except TimeoutError as error:
                        if deadline.expired():
                            raise
                        return Ending(Outcome.AGENT_ERROR, describe(error, claimed.input), exception=error)  # its own
            rewarded = self._record(result, trace)
        except TimeoutError:
            if watched is not None and watched.ended is not None:
                return Ending(Outcome.CANCELLED, f"The rollout was set to {watched.ended} while the agent ran.")
            return Ending(Outcome.TIMEOUT, f"The agent was stopped after {seconds:g} s. {TIMEOUT_SETTING}")
        except DeadlineError as error:
            return Ending(Outcome.TIMEOUT, str(error))
        except (StoreError, ExecutorError) as error:
            return Ending(Outcome.INFRA_ERROR, str(error))
        except JudgeError as error:
            return Ending(Outcome.JUDGE_ERROR, str(error), exception=error)
        except (AgentError, ConfigError) as error:
            return Ending(Outcome.AGENT_ERROR, str(error), exception=error)
        except Exception as error:  # whatever user code raises is data about this attempt
            close_unawaited(error)
            return Ending(Outcome.AGENT_ERROR, describe(error, claimed.input), exception=error)
        return Ending(Outcome.OK, rewarded=rewarded)

    async def _call(self, agent: LitAgent[Any], claimed: AttemptedRollout, resources: NamedResources) -> Any:
        method = agent.method_for(claimed.mode)
        with same_folder():
            if not agent.is_async():
                result = await run_in_thread(lambda: method(claimed.input, resources, claimed))
            else:
                result = await agent_loop().run(method(claimed.input, resources, claimed))
        if inspect.isawaitable(result):
            if not inspect.iscoroutine(result):
                raise AgentError(
                    "The agent returned a task or a future, and not its result: write return await … there."
                )
            result.close()
            raise AgentError("The agent returned a coroutine: define it with `async def`, or await it inside.")
        return result

    def _record(self, result: Any, trace: Trace) -> bool:
        """Turn what the agent returned into spans of the attempt. Returns whether there is a reward now.

        Raises AgentError that says what is wrong with it.
        """
        if result is None:
            return _is_rewarded(trace.spans)
        if isinstance(result, list):
            return _add_all(result, trace)
        if isinstance(result, Mapping) and len(result) > 1:
            raise AgentError(
                f"The agent returned a dict with {sorted(map(str, result))}. Return the number that trains; to record "
                "its parts as well:  agl.emit_reward({…}, primary_key='the one that trains')  and return None."
            )
        emit_reward(result)  # refuses what is not a finite number
        return True

    async def _finish(self, claimed: AttemptedRollout, ending: Ending) -> None:
        """Report the attempt's end, and while the store is out of reach again and again: it is kept alive meanwhile."""
        name = f"Attempt {claimed.attempt.attempt_id} of {claimed.rollout_id}"
        pause, closed = FIRST_PAUSE_SECONDS, None
        while True:
            try:
                closed = closed or await self._closed(claimed, ending)
                await self._report(claimed, closed)
                return
            except ConflictError as error:
                # It was cancelled, or timed out, while it came to its end.
                logger.info("%s had been ended already: %s", name, error)
                return
            except StoreClosedError as error:
                logger.warning("%s could not be finished: %s", name, error)
                return
            except StoreUnavailableError as error:
                logger.warning("%s is finished when the store is back: %s", name, error)
            except StoreError as error:
                # The watchdog hands the rollout out again when its lease runs out.
                logger.warning("%s could not be finished: %s", name, error)
                return
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    async def _report(self, claimed: AttemptedRollout, ending: Ending) -> None:
        """Finish the attempt, whose calls are stored by now. May be repeated."""
        rollout_id, attempt_id = claimed.rollout_id, claimed.attempt.attempt_id
        await self._reward_tools(rollout_id, attempt_id)
        await self._ready_store().update_attempt(
            rollout_id,
            attempt_id,
            status=_STATUS[ending.outcome],
            outcome=ending.outcome,
            error=storable(ending.error),
        )

    async def _closed(self, claimed: AttemptedRollout, ending: Ending) -> Ending:
        """The barrier: returns when the attempt's calls are stored, with what the gateway knows of its end.

        An attempt whose gateway is gone with its calls has failed through no fault of its agent.
        """
        if self._gateway is not None:
            try:
                summary = await self._gateway.close_attempt(claimed.rollout_id, claimed.attempt.attempt_id)
            except StoreUnavailableError:
                raise
            except StoreError as error:
                return Ending(Outcome.INFRA_ERROR, f"The attempt's calls could not be closed: {error}")
            ending = with_gateway(ending, summary)
        if ending.rewarded or claimed.metadata.get(REWARDED_LATER):
            return ending
        return Ending(Outcome.AGENT_ERROR, self._ready_agent().no_reward)

    async def _reward_tools(self, rollout_id: str, attempt_id: str) -> None:
        """Intermediate rewards by the rules of AIR; they are asked when the attempt's calls are stored."""
        if not air:
            return
        store = self._ready_store()
        spans = await store.query_spans(rollout_id, attempt_id)
        if rewards := air.rewards(list(spans), rollout_id, attempt_id):
            await store.add_many_spans(rewards)

    async def _resources(self, claimed: AttemptedRollout, trace: Trace) -> NamedResources:
        store = self._ready_store()
        update = (
            await store.get_resources_by_id(claimed.resources_id)
            if claimed.resources_id
            else await store.get_latest_resources()
        )
        resources = update.resources if update else {}
        if (recording := recording_in(resources)) is not None:
            trace.tools = ToolReplay(recording.tools)
        bound = {name: self._bind(resource, claimed, trace) for name, resource in resources.items()}
        if self._gateway is not None:
            await self._gateway.open_attempt(claimed.rollout_id, claimed.attempt.attempt_id)
        return GivenResources(bound)

    def _bind(self, resource: Any, claimed: AttemptedRollout, trace: Trace) -> Any:
        """Give the agent a plain LLM whose URL and key are good for its own attempt only.

        The trace learns them too, for clients that the agent made once for all rollouts.
        """
        if not isinstance(resource, ProxyLLM):
            return resource
        if resource.val_sampling_parameters is not None and claimed.mode is not RolloutMode.TRAIN:
            resource = resource.model_copy(update={"sampling_parameters": resource.val_sampling_parameters})
        rollout_id, attempt_id = claimed.rollout_id, claimed.attempt.attempt_id
        if self._gateway is None:
            bound = resource.for_attempt(rollout_id, attempt_id, resource.api_key)
        else:
            bound = self._gateway.bind(resource, rollout_id, attempt_id, self._ready_agent().key_scopes)
        if bound.api_key is not None and trace.access is None:
            trace.access = GatewayAccess(bound.endpoint, bound.api_key)
            instrument(current_agent_name)  # of what the agent has loaded since
        return bound

    async def _hook(self, name: str, **arguments: Any) -> None:
        for hook in self._hooks:
            try:
                async with asyncio.timeout(HOOK_SECONDS):
                    given = await getattr(hook, name)(**arguments)
                if given is not None:
                    logger.warning(_NOTHING_IS_DONE, type(hook).__name__, name, reprlib.repr(given))
            except Exception as error:  # a failing hook is the user's code; it is reported and the run goes on
                logger.error("The hook %s.%s failed: %s", type(hook).__name__, name, describe(error))

    def _ready_store(self) -> LightningStore:
        if self._store is None:
            raise RuntimeError("Call init_worker(worker_id, store) before running rollouts.")
        return self._store

    def _ready_agent(self) -> LitAgent[Any]:
        if self._agent is None:
            raise RuntimeError("Call init(agent) before running rollouts.")
        return self._agent


def _is_rewarded(spans: Sequence[Span]) -> bool:
    """Raises RewardError where there is no reward because the only ones are none."""
    if find_final_reward(spans) is not None:
        return True
    wrong = next(filter(None, (reward_error(span.name, span.attributes) for span in spans)), None)
    if wrong is not None:
        raise RewardError(wrong)
    return False


def _check_attributes(span: Span) -> None:
    if (wrong := reward_error(span.name, span.attributes)) is not None:
        raise RewardError(wrong)
    try:
        encode_seen(span.attributes)
    except StoreError as error:
        raise AgentError(f"The span '{span.name}' that the agent returned cannot be stored: {error}") from error


def _recorded(item: Any, trace: Trace) -> Any:
    """A span of OpenTelemetry's SDK as one of ours; anything else as it is."""
    return Span.from_opentelemetry(item, trace.rollout_id, trace.attempt_id) if isinstance(item, ReadableSpan) else item


def _add_all(result: Sequence[Any], trace: Trace) -> bool:
    """Record the spans or the triplets that an agent returned; returns whether there is a reward.

    Raises AgentError for anything else.
    """
    result = [_recorded(item, trace) for item in result]
    if not all(isinstance(item, Span | Triplet) for item in result):
        numbers = all(isinstance(item, int | float) for item in result)
        chat = all(isinstance(item, Mapping) and "role" in item for item in result)
        one = " Return one number, such as their mean." if numbers else ""
        one = " Return the reward: what was said is recorded already." if chat else one
        raise AgentError(f"The agent returned a list that holds something else than spans or triplets.{one}")
    for item in result:
        if isinstance(item, Span):
            _check_attributes(item)
            trace.add(item.model_copy(update={"rollout_id": trace.rollout_id, "attempt_id": trace.attempt_id}))
            continue
        attributes: dict[str, Any] = {TRIPLET_JSON: item.model_dump_json()}
        if item.reward is not None:
            attributes |= reward_attributes(item.reward)
            attributes[REWARD_RESPONSE] = item.metadata.get("response_id") or "none"
        trace.add(
            Span.from_attributes(
                name=TRIPLET, attributes=attributes, rollout_id=trace.rollout_id, attempt_id=trace.attempt_id
            )
        )
    return not any(isinstance(item, Triplet) for item in result) or find_final_reward(trace.spans) is not None
