"""The model process: one loop that samples and learns on one set of weights, with no user code and no event loop.

Between two steps of the engine it takes what arrived: requests join, aborts leave, calls are done one after the other.
A call that changes the weights first lets the running requests finish, or stops them where they are
(`ProcessSettings.in_flight`). From then on the policy samples nothing until its new weights are published, and then
goes on with nothing that the old ones computed.

Several policies on one base have one engine, which samples from all of them at once, and a learner each; while one
learns, its adapter alone is active in the model's layers.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from agentlightning.backend.base import BackendStats
from agentlightning.backend.embedded.connection import PULSE_SECONDS
from agentlightning.backend.embedded.inbox import Inbox
from agentlightning.backend.embedded.protocol import (
    Abort,
    AddPolicy,
    CallFailed,
    CheckPacking,
    Evaluate,
    Events,
    Export,
    Forward,
    ForwardBackward,
    GetInfo,
    GetStats,
    KeepHalf,
    KeepRoutes,
    LoadState,
    Lora,
    MethodCall,
    MoveReference,
    OptimStep,
    Pause,
    ProcessSettings,
    Publish,
    Pulse,
    Ready,
    RemovePolicy,
    Reply,
    Reseed,
    Resume,
    SaveState,
    StopProcess,
    TakeUp,
    ToChild,
    ToParent,
    Values,
    Verb,
    error_name,
    frame,
    is_out_of_memory,
)
from agentlightning.backend.embedded.ranks import Leader
from agentlightning.engine.base import EngineInfo
from agentlightning.engine.contexts import cache_budget
from agentlightning.engine.events import POLICY, Event, Failed, Request
from agentlightning.engine.torch_engine import TorchEngine
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.learner.adapters import load_policies
from agentlightning.learner.base import DTYPES
from agentlightning.learner.optimizer import optimizer_bytes
from agentlightning.learner.policy import LoraSpec, Policy, load_policy, seeded
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.learner.verl.learner import start_verl

logger = logging.getLogger(__name__)

_DRAINED_FIRST = (OptimStep, LoadState, Reseed, TakeUp)
"""Calls that running requests must not see the effect of."""
PUBLISH_SECONDS = 60.0
"""How long requests wait, with nothing else going on, for weights that were updated and not published."""


class Clock:
    """Adds up the wall-clock seconds spent in each activity; one of them is always going on."""

    def __init__(self) -> None:
        self.seconds = {"idle": 0.0, "sampling": 0.0, "learning": 0.0}
        self._activity = "learning"
        self._since = time.perf_counter()

    def turn_to(self, activity: str) -> None:
        now = time.perf_counter()
        self.seconds[self._activity] += now - self._since
        self._activity, self._since = activity, now


class Hosted:
    """One policy with its learner."""

    def __init__(self, policy: Policy, settings: ProcessSettings, *, learns: bool = True) -> None:
        self.policy = policy
        policy.activate()
        self._learner = _learner(policy, settings) if learns and policy.trainable() else None
        self.unpublished = False
        """The weights are not those that the engine says it samples from."""

    @property
    def learner(self) -> TorchLearner | Leader:
        if self._learner is None:
            raise ConfigError("This policy is frozen: it samples and does not learn.")
        return self._learner


class ModelServer:
    """The engine and the learners of the policies on one model, driven by the messages of an inbox."""

    def __init__(self, settings: ProcessSettings, inbox: Inbox, sock: socket.socket) -> None:
        """Loads the policies; raises `ModelError` or `ConfigError` if that cannot work."""
        transformers.logging.disable_progress_bar()
        self._inbox = inbox
        self._sock = sock
        self._threads = {
            "sampling": settings.sampling_threads,
            "learning": max(1, (settings.learning_threads or os.cpu_count() or 1) // settings.ranks),
        }
        torch.set_num_threads(self._threads["learning"])
        self._settings = settings
        policies = load_all(settings)
        self._engine = _engine(next(iter(policies.values())), settings)
        self._hosted = {
            name: Hosted(policy, settings, learns=settings.learns and name not in settings.members)
            for name, policy in policies.items()
        }
        self._drains = settings.in_flight == "finish"
        self._calls: deque[MethodCall] = deque()
        self._refused: list[Event] = []
        self._clock = Clock()
        self._paused = False
        self._stopped = False
        self._idle = False
        self._passes = 0
        self._sending = threading.Lock()

    def run(self) -> None:
        """Serve until the parent says stop or is gone."""
        gc.freeze()  # the libraries' objects stay for good; scanning them again and again would stall steps
        self._send(Ready(self._info(next(iter(self._hosted)))))
        threading.Thread(target=self._pulse, name="pulse", daemon=True).start()
        while not self._stopped:
            self._receive()
            if self._calls and not self._drains_first(self._calls[0]):
                self._turn_to("learning")
                self._passes += 1
                self._send(self._answer(self._calls.popleft()))
            if self._refused:
                events, self._refused = self._refused, []
                self._send(Events(events))
            if self._can_step():
                self._turn_to("sampling")
                self._step()

    def _drains_first(self, call: MethodCall) -> bool:
        """Whether running requests of the call's policy must finish before it can be done."""
        return self._is_drained_for(call) and self._engine.load_of(call.policy)[0] > 0

    def _is_drained_for(self, call: MethodCall) -> bool:
        return self._drains and isinstance(call.verb, _DRAINED_FIRST)

    def _admitted(self) -> list[str]:
        """The policies of which requests may start."""
        if self._paused:
            return []
        drained = {call.policy for call in list(self._calls)[:1] if self._is_drained_for(call)}
        return [name for name in self._hosted if name not in drained]

    def _held(self) -> list[str]:
        """The policies that sample nothing: their weights are not published yet."""
        return [name for name, hosted in self._hosted.items() if hosted.unpublished]

    def _can_step(self) -> bool:
        return self._engine.can_step(self._admitted(), self._held())

    def _receive(self) -> None:
        """Take all messages that arrived; wait for one if there is nothing to do."""
        message = self._inbox.poll()
        if message is None and not self._calls and not self._can_step():
            self._clock.turn_to("idle")
            held = [name for name in self._held() if any(self._engine.load_of(name))]
            self._idle = True
            message = self._inbox.wait(PUBLISH_SECONDS if held else None)
            self._idle = False
            if message is None:
                self._give_up(held)
        while message is not None:
            self._take(message)
            message = self._inbox.poll()

    def _give_up(self, held: Sequence[str]) -> None:
        """End the requests that wait for weights which nobody publishes."""
        message = (
            f"The weights were updated by optim_step and not published within {PUBLISH_SECONDS:.0f} s, so nothing "
            "could be sampled. Call backend.publish(policy) after the optimiser's steps."
        )
        self._refused += [Failed(request_id=i, message=message) for i in self._engine.abort_all(held)]

    def _take(self, message: ToChild) -> None:
        match message:
            case Request():
                try:
                    self._engine.submit(message)
                except AgentLightningError as error:
                    self._refused.append(_failed(message.request_id, error))
            case Abort(request_id):
                self._engine.abort(request_id)
            case MethodCall():
                self._calls.append(message)
            case StopProcess():
                self._stopped = True
            case ProcessSettings():
                raise AssertionError("settings come once, before the server is made")

    def _turn_to(self, activity: str) -> None:
        self._clock.turn_to(activity)
        threads = self._threads[activity]
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    def _find(self, policy: str) -> Hosted:
        self._engine.policies.find(policy)
        return self._hosted[policy]

    def _info(self, policy: str) -> EngineInfo:
        return self._engine.info(self._find(policy).policy.path, policy)

    def _step(self) -> None:
        self._passes += 1
        held = self._held()
        try:
            events: list[Event] = self._engine.step(admit=self._admitted(), held=held)
        except Exception as error:  # out of memory, a model's own bug: it costs the requests at hand, not the process
            logger.exception("A step of the engine failed; its requests are given up")
            message = f"Sampling failed in the model process: {type(error).__name__}: {error}"
            computed = [name for name in self._hosted if name not in held]
            events = [Failed(request_id=request_id, message=message) for request_id in self._engine.abort_all(computed)]
        if events:
            self._send(Events(events))

    def _answer(self, call: MethodCall) -> Reply | CallFailed:
        try:
            if isinstance(call.verb, AddPolicy):
                self._add(call.policy, call.verb)
            hosted = self._find(call.policy)
            hosted.policy.activate()
            return self._do(call.call_id, call.verb, call.policy, hosted)
        except AgentLightningError as error:
            return CallFailed(call.call_id, error_name(error), str(error))
        except Exception as error:  # disk full, out of memory, …: the caller decides what a failed call means
            verb = type(call.verb).__name__
            logger.exception("%s failed", verb)
            message = (
                f"{verb} failed in the model process: {type(error).__name__}: {error}{_what_to_do(call.verb, error)}"
            )
            return CallFailed(call.call_id, "EngineError", message)

    def _do(self, call_id: int, verb: Verb, policy: str, hosted: Hosted) -> Reply:
        match verb:
            case AddPolicy():
                pass  # it was added when the call began
            case RemovePolicy():
                self._remove(policy, hosted)
            case Publish():
                return Reply(call_id=call_id, version=self._publish(policy, hosted))
            case Pause() | Resume():
                self._paused = isinstance(verb, Pause)
            case Export(path):
                hosted.policy.export(path)
            case TakeUp(path, version):
                hosted.policy.take_up(path, version)
                hosted.unpublished = True
                self._publish(policy, hosted)
            case Reseed(seed):
                self._engine.reseed(seed, policy)
            case GetInfo():
                return Reply(call_id=call_id, info=self._info(policy))
            case GetStats():
                return Reply(call_id=call_id, stats=self._stats())
            case _:
                return _learn(call_id, verb, hosted)
        return Reply(call_id=call_id)

    def _add(self, name: str, verb: AddPolicy) -> None:
        """Have one more adapter on the model. Where that fails nothing stays of it."""
        first = next(iter(self._hosted.values())).policy
        adapters = first.adapters
        if adapters is None:
            raise ConfigError("This process has one policy, and takes no other: start it with `policies` or `frozen`.")
        if name in self._hosted:
            raise ConfigError(f"There is a policy '{name}' already.")
        with seeded(verb.seed):
            adapters.add(name, verb.path or _spec(verb.lora or Lora(), verb.seed))
        try:
            policy = replace(first, peft=adapters.peft, adapter=name, version=0)
            hosted = Hosted(policy, self._settings, learns=verb.learns)
            self._engine.add_policy(name)
        except BaseException:
            adapters.remove(name)
            raise
        self._hosted[name] = hosted

    def _remove(self, name: str, hosted: Hosted) -> None:
        assert hosted.policy.adapters is not None, "the base refuses"
        hosted.policy.adapters.remove(name)
        del self._hosted[name]
        gone = self._engine.remove_policy(name)
        self._refused += [Failed(request_id=i, message=f"The policy '{name}' was removed.") for i in gone]

    def _publish(self, policy: str, hosted: Hosted) -> int:
        """The engine goes on with the weights as they are. With nothing new its contexts stay good."""
        version = hosted.policy.version
        if hosted.unpublished:
            if parts := self._engine.weights_changed(version, policy):
                self._send(Events(parts))
            hosted.unpublished = False
        return version

    def _stats(self) -> BackendStats:
        self._clock.turn_to("learning")
        seconds, engine = self._clock.seconds, self._engine
        return BackendStats(
            sampling_s=seconds["sampling"],
            learning_s=seconds["learning"],
            idle_s=seconds["idle"],
            tokens_sampled=engine.counters.sampled,
            prefill_tokens=engine.counters.prefilled,
            cached_tokens=engine.counters.cached,
            running=engine.running,
            waiting=engine.waiting,
        )

    def _pulse(self) -> None:
        while not self._stopped:
            self._send(Pulse(self._passes, time.process_time(), self._idle))
            time.sleep(PULSE_SECONDS)

    def _send(self, message: ToParent) -> None:
        try:
            with self._sending:
                self._sock.sendall(frame(message))
        except OSError:
            logger.info("The main process is gone; the model process ends")
            self._stopped = True


def _learn(call_id: int, verb: Verb, hosted: Hosted) -> Reply:
    """Have the learner of a policy do something."""
    match verb:
        case Forward(batch, reference):
            return Reply(call_id=call_id, numbers=hosted.learner.forward(batch, reference=reference))
        case Values(batch):
            return Reply(call_id=call_id, numbers=hosted.learner.values(batch))
        case CheckPacking(batch, loss):
            return Reply(call_id=call_id, check=hosted.learner.check_packing(batch, loss))
        case ForwardBackward(batch, loss):
            return Reply(call_id=call_id, passed=hosted.learner.forward_backward(batch, loss))
        case Evaluate(batch, loss):
            if not isinstance(hosted.learner, TorchLearner):
                raise ConfigError("A loss without its gradients is computed on one rank only.")
            return Reply(call_id=call_id, passed=hosted.learner.evaluate(batch, loss))
        case OptimStep(params):
            step = hosted.learner.optim_step(params)
            hosted.unpublished = True
            return Reply(call_id=call_id, step=step)
        case KeepHalf(share):
            if isinstance(hosted.learner, TorchLearner):  # over several ranks nobody asks for it
                hosted.learner.keep_half(share)
        case KeepRoutes(batch, first):
            if isinstance(hosted.learner, TorchLearner):  # over several ranks it is refused as a setting
                hosted.learner.keep_routes(batch, first=first)
        case SaveState(path):
            hosted.learner.save_state(path)
        case LoadState(path):
            hosted.learner.load_state(path)
            hosted.unpublished = True
        case MoveReference(share):
            hosted.learner.move_reference(share)
        case _:
            raise AssertionError(f"not for learners: {verb}")
    return Reply(call_id=call_id)


def _what_to_do(verb: Verb, error: Exception) -> str:
    """The next step after an error that is nobody's bug."""
    if isinstance(verb, SaveState | Export):
        there = next(p for p in Path(verb.path).absolute().parents if p.exists())
        free = shutil.disk_usage(there).free >> 20
        return f"\n{free} MiB are free in {there}. Free some space and resume from the last checkpoint: it is whole."
    if is_out_of_memory(error):
        return "\nMemory is short: lower tokens_per_batch, or set gradient_checkpointing=True or a lora_rank."
    return ""


def _engine(policy: Policy, settings: ProcessSettings) -> TorchEngine:
    """For the policy and those that share its model."""
    policy.activate()
    budget = settings.kv_budget_bytes
    if budget is None:
        learns = settings.learns and settings.verl is None
        state = optimizer_bytes(policy.trainable(), offload=settings.learner.offload) if learns else 0
        budget = cache_budget(policy.device, state // settings.ranks)
    return TorchEngine(
        policy.model,
        policy.tokenizer,
        policy.eos_ids,
        adapters=policy.adapters,
        version=policy.version,
        max_context=settings.max_context,
        max_concurrency=settings.max_concurrency,
        kv_budget_bytes=budget,
        prefill_tokens=settings.prefill_tokens,
        seed=settings.seed,
    )


def _learner(policy: Policy, settings: ProcessSettings) -> TorchLearner | Leader:
    if settings.verl is not None:
        return start_verl(policy, settings.dtype, settings.verl, settings.learner)
    return TorchLearner(policy, settings.learner) if settings.ranks == 1 else Leader(policy, settings)


def _failed(request_id: int, error: AgentLightningError) -> Failed:
    return Failed(request_id=request_id, message=str(error), error=error_name(error))


def _spec(lora: Lora, seed: int) -> LoraSpec:
    return LoraSpec(lora.rank, lora.alpha, lora.target_modules, seed, tuple(lora.parts))


def load_all(settings: ProcessSettings) -> dict[str, Policy]:
    """The policies that these settings name, by alias."""
    if settings.dtype not in DTYPES:
        raise ConfigError(f"There is no dtype '{settings.dtype}' for weights; choose one of {', '.join(DTYPES)}.")
    lora = settings.lora
    spec = None if lora is None else _spec(lora, settings.seed or 0)
    where = {"device": settings.device, "dtype": settings.dtype}
    if settings.policies or settings.frozen is not None:
        sources = {**settings.policies, **dict.fromkeys(settings.members)}
        return load_policies(settings.model, sources, frozen=settings.frozen, lora=spec, **where)
    return {POLICY: load_policy(settings.model, lora=spec, **where)}
