"""Methods whose parameters stand in the protocol only: an implementation gets a call's arguments by their names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Given = dict[str, Any]
"""The arguments of a call by name, without those that are the protocol's defaults."""


def takes(method: Callable[P, R]) -> Callable[[Callable[[Any, Given], Awaitable[Any]]], Callable[P, R]]:
    """Decorates an implementation of a method of the protocol, which is called as that one is."""
    arguments = _Arguments(method)

    def decorate(implementation: Callable[[Any, Given], Awaitable[Any]]) -> Callable[P, R]:
        @functools.wraps(method)
        async def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await implementation(self, arguments.given(args, kwargs))

        return called  # pyright: ignore[reportReturnType]

    return decorate


class _Arguments:
    def __init__(self, method: Callable[..., Any]) -> None:
        self._signature = inspect.signature(method)
        _, *own = self._signature.parameters.values()  # the first one is self
        self._open = any(one.kind is one.VAR_KEYWORD for one in own)
        own = [one for one in own if one.kind is not one.VAR_KEYWORD]
        self._places = [one.name for one in own if one.kind is not one.KEYWORD_ONLY]
        self._needed = {one.name for one in own if one.default is one.empty}
        self._defaults = {one.name: one.default for one in own}

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Given:
        """Raises TypeError as the call of the method would."""
        values = {**dict(zip(self._places, args, strict=False)), **kwargs}
        known = self._open or values.keys() <= self._defaults.keys()
        if not known or len(values) != len(args) + len(kwargs) or not self._needed <= values.keys():
            self._signature.bind(None, *args, **kwargs)
        return {name: value for name, value in values.items() if value is not self._defaults.get(name, _NO_DEFAULT)}


_NO_DEFAULT = object()
