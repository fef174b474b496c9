"""`PolicyHandle`: one policy of a model process, to the main process an engine and a learner."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from agentlightning.engine.base import Chunk, EngineInfo, SamplingParams
from agentlightning.learner.base import Certificate, LossConfig, OptimParams, PackedBatch
from agentlightning.modelprocess.protocol import (
    Certify,
    Export,
    Forward,
    ForwardBackward,
    GetInfo,
    LoadState,
    OptimStep,
    Reply,
    Reseed,
    SaveState,
    Values,
    Verb,
)
from agentlightning.types.call import Float32Array, Int32Array

if TYPE_CHECKING:
    from agentlightning.modelprocess.client import ModelProcess


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

    async def certify(self, batch: PackedBatch, loss: LossConfig) -> Certificate:
        reply = await self._ask(Certify(batch, loss))
        assert reply.certificate is not None, reply
        return reply.certificate

    async def reseed(self, seed: int) -> None:
        """Let the engine forget all contexts and draw as a fresh one with this seed would; running requests finish."""
        await self._ask(Reseed(seed))

    async def forward_backward(self, batch: PackedBatch, loss: LossConfig) -> dict[str, float]:
        return _metrics(await self._ask(ForwardBackward(batch, loss)))

    async def optim_step(self, params: OptimParams) -> dict[str, float]:
        """See `Learner.optim_step`. Running requests finish first; new ones wait and get the new weights."""
        return _metrics(await self._ask(OptimStep(params)))

    async def save_state(self, path: str) -> None:
        await self._ask(SaveState(str(path)))

    async def load_state(self, path: str) -> None:
        await self._ask(LoadState(str(path)))

    async def export(self, path: str) -> None:
        await self._ask(Export(str(path)))

    async def _ask(self, verb: Verb) -> Reply:
        return await self._process.call(self._policy, verb)


def _metrics(reply: Reply) -> dict[str, float]:
    assert reply.metrics is not None, reply
    return reply.metrics


def _numbers(reply: Reply) -> Float32Array:
    assert reply.numbers is not None, reply
    return reply.numbers
