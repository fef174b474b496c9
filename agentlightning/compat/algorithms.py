"""What algorithms of one's own asked of their base class, and helpers for them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from agentlightning.algorithm import Algorithm
from agentlightning.store.base import LightningStore
from agentlightning.trainer.trainer import current_trainer
from agentlightning.types import Dataset, NamedResources

T = TypeVar("T")


def get_store(self: Algorithm) -> LightningStore:
    """The run's store, or the one that was set."""
    return _given(self, "store") or self.context.store


def set_store(self: Algorithm, store: LightningStore) -> None:
    """For an algorithm that no trainer runs."""
    _give(self, "store", store)


def get_trainer(self: Algorithm) -> Any:
    """The trainer of this run, or the one that was set. Raises ValueError where there is none."""
    trainer = _given(self, "trainer") or current_trainer.get()
    if trainer is None:
        raise ValueError("There is no trainer here: no Trainer runs this algorithm.")
    return trainer


def set_trainer(self: Algorithm, trainer: Any) -> None:
    """For an algorithm that no trainer runs."""
    _give(self, "trainer", trainer)


def get_adapter(self: Algorithm) -> Any:
    """The trainer's adapter; TracerTraceToTriplet if it was given none."""
    return _given(self, "adapter") or self.context.adapter


def set_adapter(self: Algorithm, adapter: Any) -> None:
    """For an algorithm that no trainer runs."""
    _give(self, "adapter", adapter)


def get_llm_proxy(self: Algorithm) -> Any:
    """The gateway of the run, or the LLMProxy that the trainer was given; None if there is neither."""
    return _given(self, "llm_proxy") or self.context.llm_proxy


def set_llm_proxy(self: Algorithm, llm_proxy: Any) -> None:
    """For an algorithm that no trainer runs."""
    _give(self, "llm_proxy", llm_proxy)


def get_initial_resources(self: Algorithm) -> NamedResources | None:
    """What the trainer was given, and the policy's endpoint if there is one."""
    given = _given(self, "initial_resources")
    if given is not None:
        return given
    resources = self.context.resources
    return dict(self.context.initial_resources if resources is None else resources.resources)


def set_initial_resources(self: Algorithm, resources: NamedResources) -> None:
    """For an algorithm that no trainer runs."""
    _give(self, "initial_resources", resources)


def is_async(self: Algorithm) -> bool:
    """Whether `run` is a coroutine function."""
    import inspect

    return inspect.iscoroutinefunction(self.run)


def call(self: Algorithm, *args: Any, **kwargs: Any) -> Any:
    """Calling an algorithm is `run`."""
    return self.run(*args, **kwargs)


def _given(algorithm: Algorithm, name: str) -> Any:
    return vars(algorithm).get(f"_given_{name}")


def _give(algorithm: Algorithm, name: str, value: Any) -> None:
    vars(algorithm)[f"_given_{name}"] = value


# ---- `agentlightning.algorithm.utils` --------------------------------------------------------------------------------


def batch_iter_over_dataset(dataset: Dataset[T], batch_size: int) -> Iterator[Sequence[T]]:
    """Batches for ever; the order is drawn anew for every pass."""
    if len(dataset) == 0:
        raise ValueError("The dataset is empty.")
    waiting: list[int] = []
    while True:
        while len(waiting) < batch_size:
            waiting += random.sample(range(len(dataset)), len(dataset))
        yield [dataset[i] for i in waiting[:batch_size]]
        waiting = waiting[batch_size:]


def with_store(function: Callable[..., Any]) -> Callable[..., Any]:
    """A coroutine method of an algorithm, given the store behind `self`."""

    @functools.wraps(function)
    async def run(self: Algorithm, *args: Any, **kwargs: Any) -> Any:
        return await function(self, get_store(self), *args, **kwargs)

    return run


def with_llm_proxy(required: bool = False, auto_start: bool = True) -> Callable[..., Any]:
    """The same with the proxy, which is started and stopped around the call if it does not run."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def run(self: Algorithm, *args: Any, **kwargs: Any) -> Any:
            proxy = get_llm_proxy(self)
            if proxy is None and required:
                raise ValueError("This algorithm needs Trainer(llm_proxy=LLMProxy(…)).")
            if proxy is None or not auto_start or proxy.is_running():
                return await function(self, proxy, *args, **kwargs)
            async with proxy:
                return await function(self, proxy, *args, **kwargs)

        return run

    return decorate
