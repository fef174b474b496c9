"""`PolicyHandle`: one policy of a model process, to the main process an engine and a learner."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from agentlightning.backend.embedded.protocol import (
    AddPolicy,
    CheckPacking,
    Evaluate,
    Export,
    Forward,
    ForwardBackward,
    GetInfo,
    KeepHalf,
    KeepRoutes,
    LoadState,
    Lora,
    MoveReference,
    OptimStep,
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
from agentlightning.types.arrays import Float32Array, Int32Array


class VerbCaller(Protocol):
    """The process behind a handle."""

    async def call(self, policy: str, verb: Verb) -> Reply: ...

    def sample(
        self,
        policy: str,
        prompt_ids: Int32Array,
        params: SamplingParams,
        *,
        stream: bool = False,
        request_id: str | None = None,
    ) -> AsyncGenerator[Chunk, None]: ...


class PolicyHandle:
    """The `Engine` and the `Learner` of the policy with this name."""

    def __init__(self, process: VerbCaller, policy: str) -> None:
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
