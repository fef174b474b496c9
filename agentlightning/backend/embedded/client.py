"""`ModelProcess` starts the model process and is its engine and its learner to the main process; `PolicyHandle` is the
same for one of its policies. Imports no torch.

Every wait ends: when the process dies, everything that waits for it raises `EngineError` with the process's last words.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import NoReturn, Self

from agentlightning.backend.base import BackendStats
from agentlightning.backend.embedded.child import Child
from agentlightning.backend.embedded.connection import STALL_SECONDS, Connection
from agentlightning.backend.embedded.protocol import (
    Abort,
    AddPolicy,
    CheckPacking,
    Evaluate,
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
    ProcessSettings,
    Publish,
    RemovePolicy,
    Reply,
    Reseed,
    SaveState,
    TakeUp,
    Values,
    Verb,
)
from agentlightning.engine.base import Chunk, EngineInfo, SamplingParams
from agentlightning.engine.events import POLICY, Request
from agentlightning.errors import BackendDied, EngineError
from agentlightning.files import local_path
from agentlightning.learner.base import (
    LossConfig,
    OptimParams,
    PackedBatch,
    PackingCheck,
    PassResult,
    StepResult,
    joined,
)
from agentlightning.types.arrays import Float32Array, Int32Array, np

logger = logging.getLogger(__name__)


class PolicyHandle:
    """The `Engine` and the `Learner` of the policy with this name."""

    def __init__(self, process: ModelProcess, policy: str) -> None:
        self._process = process
        self._policy = policy

    async def info(self) -> EngineInfo:
        reply = await self._ask(GetInfo())
        assert reply.info is not None, reply
        return reply.info

    def generate(
        self, prompt_ids: Int32Array, params: SamplingParams, *, stream: bool = False, request_id: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`. Requests are numbered by the process; `request_id` only names one in the log."""
        return self._process.sample(self._policy, prompt_ids, params, stream=stream, request_id=request_id)

    async def forward(self, batch: PackedBatch, *, reference: bool = False) -> Float32Array:
        return _numbers(await self._ask(Forward(batch, reference)))

    async def values(self, batch: PackedBatch) -> Float32Array:
        return _numbers(await self._ask(Values(batch)))

    async def check_packing(self, batch: PackedBatch, loss: LossConfig) -> PackingCheck:
        reply = await self._ask(CheckPacking(batch, loss))
        assert reply.check is not None, reply
        return reply.check

    async def publish(self) -> int:
        """See `Backend.publish`."""
        reply = await self._ask(Publish())
        assert reply.version is not None, reply
        return reply.version

    async def reseed(self, seed: int) -> None:
        """Let the engine forget all contexts and draw as a fresh one with this seed would; running requests finish."""
        await self._ask(Reseed(seed))

    async def forward_backward(self, batches: Sequence[PackedBatch], loss: LossConfig) -> PassResult:
        """See `Learner.forward_backward`. A call per pass, so that sampling goes on between them."""
        return joined([_passed(await self._ask(ForwardBackward(batch, loss))) for batch in batches])

    async def evaluate(self, batches: Sequence[PackedBatch], loss: LossConfig) -> PassResult:
        """The loss on all passes, without gradients."""
        return joined([_passed(await self._ask(Evaluate(batch, loss))) for batch in batches])

    async def keep_half(self, share: float) -> None:
        await self._ask(KeepHalf(share))

    async def keep_routes(self, batches: Sequence[PackedBatch]) -> None:
        """See `KeepsRoutes`."""
        for n, batch in enumerate(batches):
            await self._ask(KeepRoutes(batch, n == 0))

    async def optim_step(self, params: OptimParams) -> StepResult:
        """See `Learner.optim_step`. Running requests finish first; new ones wait until the weights are published."""
        reply = await self._ask(OptimStep(params))
        assert reply.step is not None, reply
        return reply.step

    async def save_state(self, uri: str) -> None:
        await self._ask(SaveState(local_path(uri)))

    async def load_state(self, uri: str) -> None:
        await self._ask(LoadState(local_path(uri)))

    async def export(self, uri: str) -> None:
        await self._ask(Export(local_path(uri)))

    async def move_reference(self, share: float) -> None:
        await self._ask(MoveReference(share))

    async def take_up(self, uri: str, version: int | None = None) -> None:
        """See `TakesUp`. `version` is that of the weights; None: one more than before."""
        await self._ask(TakeUp(local_path(uri), version))

    async def add(self, source: Lora | str, *, seed: int = 0, learns: bool = True) -> None:
        """Have an adapter of this name on the model: a new one, or the one in a directory. Without `learns` it samples
        only. Raises `ModelError` where there is none that fits, `ConfigError` where the name is taken."""
        new = isinstance(source, Lora)
        verb = AddPolicy(lora=source if new else None, path=None if new else source, seed=seed, learns=learns)
        await self._ask(verb)

    async def remove(self) -> None:
        """Forget the adapter of this name; requests that sample from it fail."""
        await self._ask(RemovePolicy())

    async def _ask(self, verb: Verb) -> Reply:
        return await self._process.call(self._policy, verb)


def _passed(reply: Reply) -> PassResult:
    assert reply.passed is not None, reply
    return reply.passed


def _numbers(reply: Reply) -> Float32Array:
    assert reply.numbers is not None, reply
    return reply.numbers


class ModelProcess(PolicyHandle):
    """The `Engine` and the `Learner` in a process of their own: an async context manager, or `start` and `close`.

    Where it holds several policies, `policy(name)` is each one's engine and learner, and the process stands for the
    first.

    `start_timeout` bounds loading the model, in seconds. Nothing limits how long work may take, only how long
    it may stand still: a process that makes no progress for `stall_seconds`, though asked, is ended.
    """

    def __init__(
        self,
        settings: ProcessSettings,
        *,
        start_timeout: float = 600.0,
        stall_seconds: float = STALL_SECONDS,
        spawn: Callable[[ProcessSettings], Awaitable[Connection]] = Child.spawn,
    ) -> None:
        super().__init__(self, next(iter(settings.policies), settings.frozen or POLICY))
        self.settings = settings
        self._start_timeout = start_timeout
        self._stall_seconds = stall_seconds
        self._numbers = itertools.count(1)
        self._spawn = spawn
        self._child: Connection | None = None

    async def start(self) -> EngineInfo:
        """Start the process and load the model.

        Raises the child's own `ModelError` or `ConfigError`, or `EngineError` if it died or was not ready in time.
        """
        if self._child is not None:
            raise EngineError("The model process was started already; make another one to start it again.")
        self._child = child = await self._spawn(self.settings)
        child.watch.limit = self._stall_seconds
        try:
            async with asyncio.timeout(self._start_timeout):
                return (await child.ready).info
        except TimeoutError:
            raise EngineError(
                f"The model process was not ready within {self._start_timeout:.0f} s.{child.last_words()}\n"
                "Loading a large model from a slow disk may need a longer start_timeout."
            ) from None
        finally:
            if not child.is_ready:
                self._child = None
                await child.kill()

    async def close(self) -> None:
        """End the process after the work in hand; what still waits for it raises `EngineError`."""
        child, self._child = self._child, None
        if child is not None:
            await child.stop()

    async def watch(self) -> NoReturn:
        """Wait until the process ends by itself, and raise `BackendDied` that says how."""
        raise BackendDied(await self._running().death())

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def pid(self) -> int | None:
        """The process, if it was started."""
        return None if self._child is None else self._child.pid

    async def stats(self) -> BackendStats:
        """How the process spent its time so far, and on how many tokens."""
        reply = await self._ask(GetStats())
        assert reply.stats is not None, reply
        return reply.stats

    def policy(self, name: str) -> PolicyHandle:
        """One of several policies; nothing is asked of the process yet."""
        return PolicyHandle(self, name)

    async def sample(
        self,
        policy: str,
        prompt_ids: Int32Array,
        params: SamplingParams,
        *,
        stream: bool = False,
        request_id: str | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """`Engine.generate` of a policy. Requests are numbered here; `request_id` only names one in the log."""
        child = self._running()
        number = next(self._numbers)
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        request = Request(request_id=number, prompt_ids=prompt, params=params, stream=stream, policy=policy)
        answers = child.request(request)
        try:
            finished = False
            while not finished:
                answer = await answers.get()
                if not isinstance(answer, Chunk):
                    raise answer
                finished = answer.finish_reason is not None
                yield answer
        finally:
            if child.forget(number):
                logger.debug("Request %s is no longer wanted", request_id or number)
                child.send(Abort(number))

    def _running(self) -> Connection:
        if self._child is None:
            raise EngineError("The model process is not running; call start() first.")
        return self._child

    async def call(self, policy: str, verb: Verb) -> Reply:
        """Have something done for a policy; raises what the process refused it with."""
        return await self._running().call(MethodCall(next(self._numbers), verb, policy))
