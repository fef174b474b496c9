"""`@algo`: an algorithm that is a function. It asks for what it uses by the names of its parameters."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

from agentlightning.algorithm.base import Algorithm, TrainingContext
from agentlightning.errors import ConfigError
from agentlightning.types import Dataset

_GIVEN: dict[str, Callable[[TrainingContext], Any]] = {
    "store": lambda context: context.store,
    "initial_resources": lambda context: context.initial_resources,
    "llm_proxy": lambda context: context.llm_proxy,
    "adapter": lambda context: context.adapter,
    "context": lambda context: context,
}
"""What a function may ask for besides the data sets, and where it is found."""


class FunctionalAlgorithm(Algorithm):
    """An algorithm made of a function. Calling it calls the function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function
        self._parameters = inspect.signature(function).parameters
        functools.update_wrapper(self, function)
        known = {*_GIVEN, "train_dataset", "val_dataset"}
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        for name, parameter in self._parameters.items():
            if name not in known and parameter.default is parameter.empty and parameter.kind not in kinds:
                raise ConfigError(
                    f"The algorithm {function.__name__} asks for {name!r}, which nobody gives it. It can ask for "
                    f"{', '.join(sorted(known))}; anything else needs a default."
                )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> Any:
        """Call the function with what it asks for; one that is not async runs in a thread.

        Raises ConfigError for a data set that the function does not take.
        """
        given = {name: find(self.context) for name, find in _GIVEN.items() if name in self._parameters}
        for name, dataset in (("train_dataset", train_dataset), ("val_dataset", val_dataset)):
            if name in self._parameters:
                given[name] = dataset
            elif dataset is not None:
                raise ConfigError(
                    f"The algorithm {self._function.__name__} takes no {name}, and one was given to fit. Add the "
                    f"parameter {name}, or leave the data out."
                )
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**given)
        return await asyncio.to_thread(lambda: self._function(**given))


def algo(function: Callable[..., Any]) -> FunctionalAlgorithm:
    """Make an algorithm of `async def f(*, store, train_dataset, …)`, or of a plain function.

    It is given, by name, what it asks for: `store`, `train_dataset`, `val_dataset`, `initial_resources`, `llm_proxy`,
    `adapter`, and `context` for everything else.
    """
    return FunctionalAlgorithm(function)
