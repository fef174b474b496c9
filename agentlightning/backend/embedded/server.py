"""The model process: one loop that samples and learns on one set of weights, with no user code and no event loop.

Between two steps of the engine it takes what arrived: requests join, aborts leave, calls are done one after the other.
A call that changes the weights first lets the running requests finish, or stops them where they are
(`Settings.in_flight`). From then on the policy samples nothing until its new weights are published, and then goes on
with nothing that the old ones computed.

Several policies on one base take turns: each has an engine with contexts of its own and a learner, and is active in the
model's layers while one of them computes.
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
from pathlib import Path

import torch
import transformers

from agentlightning.backend.base import BackendStats
from agentlightning.backend.embedded.inbox import Inbox
from agentlightning.backend.embedded.protocol import (
    Abort,
    Call,
    CheckPacking,
    Events,
    Export,
    Forward,
    ForwardBackward,
    GetInfo,
    GetStats,
    KeepHalf,
    KeepRoutes,
    LoadState,
    MoveReference,
    OptimStep,
    Pause,
    Publish,
    Pulse,
    Ready,
    Refused,
    Reply,
    Reseed,
    Resume,
    SaveState,
    Settings,
    Stop,
    TakeUp,
    ToChild,
    ToParent,
    Values,
    Verb,
    error_name,
    frame,
)
from agentlightning.backend.embedded.ranks import Leader
from agentlightning.backend.embedded.stall import PULSE_SECONDS
from agentlightning.engine.base import EngineInfo
from agentlightning.engine.events import POLICY, Event, Failed, Request
from agentlightning.engine.torch_engine import TorchEngine
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.learner.adapters import load_policies
from agentlightning.learner.base import DTYPES
from agentlightning.learner.policy import LoraSpec, Policy, load_policy
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.learner.verl.learner import start_verl

logger = logging.getLogger(__name__)

_DRAINED_FIRST = (OptimStep, LoadState, Reseed, TakeUp)
"""Calls that running requests must not see the effect of."""
_OUT_OF_MEMORY = ("can't allocate memory", "MPS backend out of memory")
"""What torch says in plain RuntimeErrors, on the CPU and on Apple's GPU."""
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
    """One policy with its engine and its learner."""

    def __init__(self, policy: Policy, settings: Settings, share: int, *, learns: bool = True) -> None:
        """`share` policies divide the memory for contexts among them."""
        self.policy = policy
        policy.activate()
        self.engine = TorchEngine(
            policy.model,
            policy.tokenizer,
            policy.eos_ids,
            version=policy.version,
            max_context=settings.max_context,
            max_concurrency=settings.max_concurrency,
            kv_budget_bytes=settings.kv_budget_bytes // share,
            prefill_tokens=settings.prefill_tokens,
            seed=settings.seed,
        )
        self._learner = _learner(policy, settings) if learns and policy.trainable() else None
        self.unpublished = False
        """The weights are not those that the engine says it samples from."""

    @property
    def learner(self) -> TorchLearner | Leader:
        if self._learner is None:
            raise ConfigError("This policy is frozen: it samples and does not learn.")
        return self._learner

    def info(self) -> EngineInfo:
        return self.engine.info(self.policy.path)


class Server:
    """Engines and learners of the policies on one model, driven by the messages of an inbox."""

    def __init__(self, settings: Settings, inbox: Inbox, sock: socket.socket) -> None:
        """Loads the policies; raises `ModelError` or `ConfigError` if that cannot work."""
        transformers.logging.disable_progress_bar()
        self._inbox = inbox
        self._sock = sock
        self._threads = {
            "sampling": settings.sampling_threads,
            "learning": max(1, (settings.learning_threads or os.cpu_count() or 1) // settings.ranks),
        }
        torch.set_num_threads(self._threads["learning"])
        policies = load_all(settings)
        self._hosted = {
            name: Hosted(policy, settings, len(policies), learns=settings.learns and name not in settings.members)
            for name, policy in policies.items()
        }
        self._drains = settings.in_flight == "finish"
        self._calls: deque[Call] = deque()
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
        self._send(Ready(next(iter(self._hosted.values())).info()))
        threading.Thread(target=self._pulse, name="pulse", daemon=True).start()
        while not self._stopped:
            self._receive()
            draining = self._draining()
            if self._calls and not (draining is not None and draining.engine.running):
                self._turn_to("learning")
                self._passes += 1
                self._send(self._answer(self._calls.popleft()))
            if self._refused:
                events, self._refused = self._refused, []
                self._send(Events(events))
            for hosted in self._hosted.values():
                if self._can_step(hosted):
                    self._turn_to("sampling")
                    self._step(hosted, admit=hosted is not draining and not self._paused)

    def _draining(self) -> Hosted | None:
        """The policy whose running requests must finish before the next call can be done."""
        if not self._calls or not self._drains or not isinstance(self._calls[0].verb, _DRAINED_FIRST):
            return None
        return self._hosted.get(self._calls[0].policy)

    def _can_step(self, hosted: Hosted) -> bool:
        engine = hosted.engine
        return not hosted.unpublished and bool(engine.running or (engine.waiting and not self._paused))

    def _receive(self) -> None:
        """Take all messages that arrived; wait for one if there is nothing to do."""
        message = self._inbox.poll()
        if message is None and not self._calls and not any(map(self._can_step, self._hosted.values())):
            self._clock.turn_to("idle")
            held = [h for h in self._hosted.values() if h.unpublished and h.engine.active]
            self._idle = True
            message = self._inbox.wait(PUBLISH_SECONDS if held else None)
            self._idle = False
            if message is None:
                self._give_up(held)
        while message is not None:
            self._take(message)
            message = self._inbox.poll()

    def _give_up(self, held: Sequence[Hosted]) -> None:
        """End the requests that wait for weights which nobody publishes."""
        message = (
            f"The weights were updated by optim_step and not published within {PUBLISH_SECONDS:.0f} s, so nothing "
            "could be sampled. Call backend.publish(policy) after the optimiser's steps."
        )
        for hosted in held:
            self._refused += [Failed(request_id=i, message=message) for i in hosted.engine.abort_all()]

    def _take(self, message: ToChild) -> None:
        match message:
            case Request():
                try:
                    self._find(message.policy).engine.submit(message)
                except AgentLightningError as error:
                    self._refused.append(_failed(message.request_id, error))
            case Abort(request_id):
                for hosted in self._hosted.values():
                    hosted.engine.abort(request_id)
            case Call():
                self._calls.append(message)
            case Stop():
                self._stopped = True
            case Settings():
                raise AssertionError("settings come once, before the server is made")

    def _turn_to(self, activity: str) -> None:
        self._clock.turn_to(activity)
        threads = self._threads[activity]
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    def _find(self, policy: str) -> Hosted:
        if policy not in self._hosted:
            raise ConfigError(f"There is no policy '{policy}' here; there are: {', '.join(self._hosted)}.")
        return self._hosted[policy]

    def _step(self, hosted: Hosted, *, admit: bool) -> None:
        self._passes += 1
        try:
            hosted.policy.activate()
            events: list[Event] = hosted.engine.step(admit=admit)
        except Exception as error:  # out of memory, a model's own bug: it costs the requests at hand, not the process
            logger.exception("A step of the engine failed; its requests are given up")
            message = f"Sampling failed in the model process: {type(error).__name__}: {error}"
            events = [Failed(request_id=request_id, message=message) for request_id in hosted.engine.abort_all()]
        if events:
            self._send(Events(events))

    def _answer(self, call: Call) -> Reply | Refused:
        try:
            hosted = self._find(call.policy)
            hosted.policy.activate()
            return self._do(call.call_id, call.verb, hosted)
        except AgentLightningError as error:
            return Refused(call.call_id, error_name(error), str(error))
        except Exception as error:  # disk full, out of memory, …: the caller decides what a failed call means
            verb = type(call.verb).__name__
            logger.exception("%s failed", verb)
            message = (
                f"{verb} failed in the model process: {type(error).__name__}: {error}{_what_to_do(call.verb, error)}"
            )
            return Refused(call.call_id, "EngineError", message)

    def _do(self, call_id: int, verb: Verb, hosted: Hosted) -> Reply:
        match verb:
            case Forward(batch, reference):
                return Reply(call_id=call_id, numbers=hosted.learner.forward(batch, reference=reference))
            case Values(batch):
                return Reply(call_id=call_id, numbers=hosted.learner.values(batch))
            case CheckPacking(batch, loss):
                return Reply(call_id=call_id, check=hosted.learner.check_packing(batch, loss))
            case ForwardBackward(batch, loss):
                return Reply(call_id=call_id, passed=hosted.learner.forward_backward(batch, loss))
            case KeepHalf(share):
                if isinstance(hosted.learner, TorchLearner):  # over several ranks nobody asks for it
                    hosted.learner.keep_half(share)
            case KeepRoutes(batch, first):
                if isinstance(hosted.learner, TorchLearner):  # over several ranks it is refused as a setting
                    hosted.learner.keep_routes(batch, first=first)
            case OptimStep(params):
                step = hosted.learner.optim_step(params)
                hosted.unpublished = True
                return Reply(call_id=call_id, step=step)
            case Publish():
                return Reply(call_id=call_id, version=self._publish(hosted))
            case Pause() | Resume():
                self._paused = isinstance(verb, Pause)
            case SaveState(path):
                hosted.learner.save_state(path)
            case LoadState(path):
                hosted.learner.load_state(path)
                hosted.unpublished = True
            case Export(path):
                hosted.policy.export(path)
            case MoveReference(share):
                hosted.learner.move_reference(share)
            case TakeUp(path, version):
                hosted.policy.take_up(path, version)
                hosted.unpublished = True
                self._publish(hosted)
            case Reseed(seed):
                hosted.engine.reseed(seed)
            case GetInfo():
                return Reply(call_id=call_id, info=hosted.info())
            case GetStats():
                return Reply(call_id=call_id, stats=self._stats())
        return Reply(call_id=call_id)

    def _publish(self, hosted: Hosted) -> int:
        """The engine goes on with the weights as they are. With nothing new its contexts stay good."""
        version = hosted.policy.version
        if hosted.unpublished:
            if parts := hosted.engine.weights_changed(version):
                self._send(Events(parts))
            hosted.unpublished = False
        return version

    def _stats(self) -> BackendStats:
        self._clock.turn_to("learning")
        seconds, engines = self._clock.seconds, [hosted.engine for hosted in self._hosted.values()]
        return BackendStats(
            sampling_s=seconds["sampling"],
            learning_s=seconds["learning"],
            idle_s=seconds["idle"],
            tokens_sampled=sum(e.counters.sampled for e in engines),
            prefill_tokens=sum(e.counters.prefilled for e in engines),
            cached_tokens=sum(e.counters.cached for e in engines),
            running=sum(e.running for e in engines),
            waiting=sum(e.waiting for e in engines),
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


def _what_to_do(verb: Verb, error: Exception) -> str:
    """The next step after an error that is nobody's bug."""
    if isinstance(verb, SaveState | Export):
        there = next(p for p in Path(verb.path).absolute().parents if p.exists())
        free = shutil.disk_usage(there).free >> 20
        return f"\n{free} MiB are free in {there}. Make room and resume from the last checkpoint: it is whole."
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY):
        return "\nMemory is short: lower tokens_per_batch, or set gradient_checkpointing=True or a lora_rank."
    return ""


def _learner(policy: Policy, settings: Settings) -> TorchLearner | Leader:
    if settings.verl is not None:
        return start_verl(policy, settings.dtype, settings.verl, settings.learner)
    return TorchLearner(policy, settings.learner) if settings.ranks == 1 else Leader(policy, settings)


def _failed(request_id: int, error: AgentLightningError) -> Failed:
    return Failed(request_id=request_id, message=str(error), error=error_name(error))


def load_all(settings: Settings) -> dict[str, Policy]:
    """The policies that these settings name, by alias."""
    if settings.dtype not in DTYPES:
        raise ConfigError(f"There is no dtype '{settings.dtype}' for weights; choose one of {', '.join(DTYPES)}.")
    lora = settings.lora
    spec = None if lora is None else LoraSpec(lora.rank, lora.alpha, lora.target_modules, settings.seed or 0)
    where = {"device": settings.device, "dtype": settings.dtype}
    if settings.policies:
        sources = {**settings.policies, **dict.fromkeys(settings.members)}
        return load_policies(settings.model, sources, frozen=settings.frozen, lora=spec, **where)
    return {POLICY: load_policy(settings.model, lora=spec, **where)}
