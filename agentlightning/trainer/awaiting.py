"""A coroutine that says what to write when nobody awaits it. What it is not: a task; nothing of it runs by itself."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Coroutine, Generator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Awaited(Coroutine[Any, Any, T]):
    """The coroutine `inner`. Where it is dropped without having begun, or read as if it were the result, `words` say
    how to call it: as an exception for a name that it has not, and as a RuntimeWarning otherwise.
    """

    def __init__(self, inner: Coroutine[Any, Any, T], words: str) -> None:
        self._inner, self._words = inner, words
        self._awaited = False

    def send(self, value: Any, /) -> Any:
        return self._inner.send(value)

    def throw(self, *error: Any) -> Any:
        return self._inner.throw(*error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, T]:
        self._awaited = True  # whoever awaits holds the inner one alone from now on
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"A coroutine has no {name!r}. {self.__dict__.get('_words', '')}", name=name, obj=self)

    def __del__(self) -> None:
        if not self._awaited and inspect.getcoroutinestate(self._inner) == inspect.CORO_CREATED:
            self._inner.close()  # else Python warns as well
            warnings.warn(self._words, RuntimeWarning, stacklevel=2)


def says_how_to_await(
    words: str,
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """For a public coroutine function: `words` are for callers who forget `await`."""

    def around(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
            return Awaited(function(*args, **kwargs), words)

        return call

    return around
