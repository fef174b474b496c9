"""A learner over several ranks: rank 0 in the model process, each other one in a process of its own, which is started
here or waits on another machine.

Every verb goes to all ranks, which do it together (`learner.rank_learner`); after a step rank 0 copies the new weights
into the whole model, from which the engine samples and which is exported. When a rank ends by itself, the model process
names it and ends too: the run goes on from its last checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec
import torch
import torch.distributed as dist
import transformers

from agentlightning.backend.embedded.inbox import Inbox
from agentlightning.backend.embedded.protocol import (
    Forward,
    ForwardBackward,
    LoadState,
    MethodCall,
    OptimStep,
    ProcessSettings,
    RankPlace,
    SaveState,
    SocketAddress,
    StopProcess,
    Verb,
    frame,
)
from agentlightning.engine.events import POLICY
from agentlightning.errors import AgentLightningError, ConfigError, EngineError
from agentlightning.files import atomic_directory
from agentlightning.learner.base import (
    LossConfig,
    OptimParams,
    PackedBatch,
    PackingCheck,
    PassResult,
    StepResult,
)
from agentlightning.learner.policy import LoraSpec, Policy, load_policy
from agentlightning.learner.rank_learner import RankLearner
from agentlightning.learner.torch_learner import STATE_FILE, TorchLearner
from agentlightning.types.call import Float32Array

logger = logging.getLogger(__name__)

Done = TypeVar("Done")

MEETING_SECONDS = 300.0
"""How long ranks wait for each other: to begin, and in a pass."""
_SECONDS_TO_NAME = 3.0
_REACH_SECONDS = 60.0


class Leader:
    """The verbs of `TorchLearner`, done by all ranks together."""

    def __init__(self, policy: Policy, settings: ProcessSettings) -> None:
        """`policy` is the whole model. Starts the other ranks; raises what any rank finds wrong with the model."""
        self.policy = policy
        addresses = settings.followers
        self._followers = [_reach(a) for a in addresses] or [_start_here() for _ in range(1, settings.ranks)]
        meeting = _meeting(self._followers[0].sock.getsockname()[0] if addresses else "127.0.0.1")
        for rank, follower in enumerate(self._followers, 1):
            place = RankPlace(rank, settings.ranks, meeting)
            threading.Thread(target=self._watch, args=(rank, follower), daemon=True).start()
            follower.sock.sendall(frame(msgspec.structs.replace(settings, place=place)))
        self._mine = join(msgspec.structs.replace(settings, place=RankPlace(0, settings.ranks, meeting)))
        self._whole: TorchLearner | None = None

    def forward(self, batch: PackedBatch, *, reference: bool = False) -> Float32Array:
        return self._together(Forward(batch, reference), lambda: self._mine.forward(batch, reference=reference))

    def values(self, batch: PackedBatch) -> Float32Array:
        raise ConfigError("This learner has no critic: it is spread over ranks.")

    def check_packing(self, batch: PackedBatch, loss: LossConfig) -> PackingCheck:
        """On the whole model, by this rank alone."""
        if self._whole is None:
            self._whole = TorchLearner(self.policy, self._mine.options)
        return self._whole.check_packing(batch, loss)

    def forward_backward(self, batch: PackedBatch, loss: LossConfig) -> PassResult:
        return self._together(ForwardBackward(batch, loss), lambda: self._mine.forward_backward(batch, loss))

    def optim_step(self, params: OptimParams) -> StepResult:
        def step() -> StepResult:
            result = self._mine.optim_step(params)
            self._mine.copy_to(self.policy.trainable())
            return result

        result = self._together(OptimStep(params), step)
        self.policy.version = self._mine.policy.version
        return result

    def move_reference(self, share: float) -> None:
        raise ConfigError("The reference of a learner over ranks stays where it is: leave reference_every out.")

    def save_state(self, path: str | Path) -> None:
        """Write the same file as one rank does."""
        state = self._together(SaveState(str(path)), self._mine.state)
        with atomic_directory(Path(path)) as directory:
            torch.save(state, directory / STATE_FILE)

    def load_state(self, path: str | Path) -> None:
        self._together(LoadState(str(path)), lambda: self._mine.load_state(path))
        self.policy.version = self._mine.policy.version

    def export(self, path: str | Path) -> None:
        self.policy.export(path)

    def _together(self, verb: Verb, work: Callable[[], Done]) -> Done:
        """Have the other ranks do what this one does. An error that not all of them have leaves them out of step, which
        only new processes mend."""
        data = frame(MethodCall(0, verb, POLICY))
        try:
            for follower in self._followers:
                follower.sock.sendall(data)
            return work()
        except AgentLightningError:
            raise
        except Exception:
            time.sleep(_SECONDS_TO_NAME)  # a rank that died is named meanwhile, by whoever watches it
            logger.exception("%s failed on learner rank 0; the model process ends", type(verb).__name__)
            _exit_now()

    def _watch(self, rank: int, follower: Follower) -> None:
        """End this process when a rank ends: the others wait for it in the middle of a pass."""
        logger.error("Learner rank %d %s; the model process ends with it", rank, follower.wait())
        _exit_now()


def _meeting(host: str) -> str:
    """Where ranks find each other, on a free port of this machine."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"tcp://{host}:{probe.getsockname()[1]}"


def join(settings: ProcessSettings) -> RankLearner:
    """Meet the other ranks and load this one's shard. Raises `ModelError` or `ConfigError`, on all ranks alike."""
    place = settings.place
    assert place is not None
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(max(1, (settings.learning_threads or os.cpu_count() or 1) // place.ranks))
    device = device_of(settings.device, place.rank)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo",
        init_method=place.meeting,
        rank=place.rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=MEETING_SECONDS),
    )
    if device.startswith("cuda"):
        gpus: list[str] = [""] * place.ranks
        dist.all_gather_object(gpus, str(torch.cuda.get_device_properties(device).uuid))
        refuse_shared_gpus(gpus)
    lora = settings.lora
    spec = None if lora is None else LoraSpec(lora.rank, lora.alpha, lora.target_modules, settings.seed or 0)
    policy = load_policy(settings.model, device=device, dtype=settings.dtype, lora=spec)
    return RankLearner(policy, settings.learner, tensor_parallel=settings.tensor_parallel)


def refuse_shared_gpus(gpus: Sequence[str]) -> None:
    """`gpus` names each rank's. Raises `ConfigError` where two have the same one, which NCCL, by which they meet, would
    refuse in the middle of the first pass."""
    for rank, gpu in enumerate(gpus):
        if (other := gpus.index(gpu)) < rank:
            raise ConfigError(
                f"Learner ranks {other} and {rank} are on the same GPU; each needs one of its own, and there are "
                f"{len(set(gpus))} for {len(gpus)} ranks. Set ranks={len(set(gpus))}, or leave it out."
            )


def device_of(device: str, rank: int) -> str:
    """Where a rank computes: ranks take turns on CUDA's GPUs; they do not meet on others, so without it they are on the
    CPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("mps"):
        raise ConfigError("Several ranks meet on 'cuda' or on 'cpu', not on 'mps'. Leave `ranks` out.")
    return f"cuda:{rank % torch.cuda.device_count()}" if device == "cuda" else device


def follow(sock: socket.socket) -> None:
    """Do what rank 0 says until it is gone. Errors are left to rank 0, which has the same ones and reports them."""
    inbox = Inbox(sock)
    settings = inbox.wait()
    if not isinstance(settings, ProcessSettings):
        return
    try:
        learner = join(settings)
    except AgentLightningError:
        inbox.wait()  # for its end: rank 0 found the same, and is about to say it
        return
    while not isinstance(message := inbox.wait(), StopProcess):
        assert isinstance(message, MethodCall), message
        try:
            _do(learner, message.verb)
        except AgentLightningError as error:  # rank 0 raises the same, and what it means is decided there
            logger.info("%s", error)


def _do(learner: RankLearner, verb: Verb) -> None:
    match verb:
        case Forward(batch, reference):
            learner.forward(batch, reference=reference)
        case ForwardBackward(batch, loss):
            learner.forward_backward(batch, loss)
        case OptimStep(params):
            learner.optim_step(params)
            learner.copy_to(None)
        case SaveState():
            learner.state()
        case LoadState(path):
            learner.load_state(path)
        case _:
            raise AssertionError(f"not for ranks: {verb}")


@dataclass(frozen=True, slots=True)
class Follower:
    """Another rank than 0, as rank 0 holds it."""

    sock: socket.socket
    wait: Callable[[], str]
    """Returns when the rank has ended, with the words for which one it was and how it ended."""


def _start_here() -> Follower:
    """A process of this machine, which ends with this one."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "agentlightning.backend.embedded.rank", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )

    def wait() -> str:
        code = process.wait()
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"(process {process.pid}) ended {how}"

    return Follower(ours, wait)


def _reach(address: SocketAddress) -> Follower:
    """A rank that waits at an address. Raises EngineError where none does."""
    try:
        sock = socket.create_connection((address.host, address.port), timeout=_REACH_SECONDS)
    except OSError as error:
        raise EngineError(f"The learner's rank at {address.host}:{address.port} cannot be reached: {error}.") from error
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Between two steps nothing is sent; a machine that is gone must be noticed all the same.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.sendall(address.key.encode())

    def wait() -> str:
        try:
            while sock.recv(1 << 12):
                pass  # a rank sends nothing
        except OSError:
            pass
        return f"(at {address.host}:{address.port}) is gone"

    return Follower(sock, wait)


def _exit_now() -> NoReturn:
    """End this process without a word to those who wait in the middle of a pass."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
