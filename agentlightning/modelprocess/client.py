"""`ModelProcess`: starts the model process and is its engine and its learner to the main process. Imports no torch.

Every wait ends: when the process dies, everything that waits for it raises `EngineError` with the process's last words.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import NoReturn, Self

import msgspec
import numpy as np

from agentlightning.engine.base import Chunk, EngineInfo, SamplingParams
from agentlightning.engine.events import Request
from agentlightning.errors import EngineError, ModelProcessDied
from agentlightning.learner.base import Certificate, LossConfig, OptimParams, PackedBatch
from agentlightning.modelprocess.child import Child
from agentlightning.modelprocess.protocol import (
    Abort,
    Call,
    Certify,
    Export,
    Forward,
    ForwardBackward,
    GetInfo,
    GetStats,
    LoadState,
    OptimStep,
    Reply,
    Reseed,
    SaveState,
    Settings,
    Stats,
    Values,
    Verb,
)
from agentlightning.types.call import Float32Array, Int32Array

logger = logging.getLogger(__name__)


class ModelProcess:
    """The `Engine` and the `Learner` in a process of their own: an async context manager, or `start` and `close`.

    `start_timeout` bounds loading the model, `call_timeout` each call of the learner (including the wait for running
    requests to finish where it changes the weights), in seconds.
    """

    def __init__(self, settings: Settings, *, start_timeout: float = 600.0, call_timeout: float = 3600.0) -> None:
        self.settings = settings
        self._start_timeout = start_timeout
        self._call_timeout = call_timeout
        self._numbers = itertools.count(1)
        self._child: Child | None = None

    async def start(self) -> EngineInfo:
        """Start the process and load the model.

        Raises the child's own `ModelError` or `ConfigError`, or `EngineError` if it died or was not ready in time.
        """
        if self._child is not None:
            raise EngineError("The model process was started already; use restart() to start it again.")
        self._child = child = await Child.spawn(self.settings)
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

    async def restart(self, model: str | None = None) -> EngineInfo:
        """Start the process again, dead or alive, from `model` if given (the weights of a checkpoint)."""
        child, self._child = self._child, None
        if child is not None:
            await child.kill()
        if model is not None:
            self.settings = msgspec.structs.replace(self.settings, model=model)
        return await self.start()

    async def watch(self) -> NoReturn:
        """Wait until the process ends by itself, and raise `ModelProcessDied` that says how."""
        raise ModelProcessDied(await self._running().death())

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

    async def info(self) -> EngineInfo:
        reply = await self._call(GetInfo())
        assert reply.info is not None, reply
        return reply.info

    async def stats(self) -> Stats:
        """How the process spent its time so far, and on how many tokens."""
        reply = await self._call(GetStats())
        assert reply.stats is not None, reply
        return reply.stats

    async def generate(
        self, prompt_ids: Int32Array, params: SamplingParams, *, stream: bool = False, request_id: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`. Requests are numbered here; `request_id` only names one in the log."""
        child = self._running()
        number = next(self._numbers)
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        answers = child.request(Request(request_id=number, prompt_ids=prompt, params=params, stream=stream))
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

    async def forward(self, batch: PackedBatch, *, reference: bool = False) -> Float32Array:
        return _numbers(await self._call(Forward(batch, reference)))

    async def values(self, batch: PackedBatch) -> Float32Array:
        return _numbers(await self._call(Values(batch)))

    async def certify(self, batch: PackedBatch, loss: LossConfig) -> Certificate:
        reply = await self._call(Certify(batch, loss))
        assert reply.certificate is not None, reply
        return reply.certificate

    async def reseed(self, seed: int) -> None:
        """Let the engine forget all contexts and draw as a fresh one with this seed would; running requests finish."""
        await self._call(Reseed(seed))

    async def forward_backward(self, batch: PackedBatch, loss: LossConfig) -> dict[str, float]:
        return _metrics(await self._call(ForwardBackward(batch, loss)))

    async def optim_step(self, params: OptimParams) -> dict[str, float]:
        """See `Learner.optim_step`. Running requests finish first; new ones wait and get the new weights."""
        return _metrics(await self._call(OptimStep(params)))

    async def save_state(self, path: str) -> None:
        await self._call(SaveState(str(path)))

    async def load_state(self, path: str) -> None:
        await self._call(LoadState(str(path)))

    async def export(self, path: str) -> None:
        await self._call(Export(str(path)))

    def _running(self) -> Child:
        if self._child is None:
            raise EngineError("The model process is not running; call start() first.")
        return self._child

    async def _call(self, verb: Verb) -> Reply:
        child = self._running()
        number = next(self._numbers)
        try:
            async with asyncio.timeout(self._call_timeout):
                return await child.call(Call(number, verb))
        except TimeoutError:
            raise EngineError(
                f"The model process did not finish {type(verb).__name__} within {self._call_timeout:.0f} s. "
                "It may hang; restart() starts it again from the last checkpoint."
            ) from None


def _metrics(reply: Reply) -> dict[str, float]:
    assert reply.metrics is not None, reply
    return reply.metrics


def _numbers(reply: Reply) -> Float32Array:
    assert reply.numbers is not None, reply
    return reply.numbers
