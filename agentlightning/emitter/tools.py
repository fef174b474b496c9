"""`replayed`: tools whose results a fork takes from the record, so that their side effects do not happen again.

In an attempt each call of a decorated function is an operation whose span has its arguments and its result. In a fork a
call is answered from these spans, and is itself recorded as one of them, so that a fork can be forked.

A wrong answer is worse than a function that runs again. So only results that JSON gives back as they were are recorded;
arguments that JSON cannot hold are like no others; a call that failed keeps its place among the calls like it; and what
a decorated function calls is compared with what the same call of it had called, and with nothing else.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar, overload

from agentlightning.arguments import explained
from agentlightning.emitter.operation import OpenOperation
from agentlightning.emitter.record import exact_json
from agentlightning.errors import ConfigError
from agentlightning.keys import redacted
from agentlightning.tracer.trace import Trace, current_trace
from agentlightning.types import Attributes, SpanStatus
from agentlightning.types.names import (
    OPERATION_INPUT,
    OPERATION_NAME,
    OPERATION_OUTPUT,
    REPLAYABLE,
    REPLAYABLE_INSIDE,
    REPLAYED_FROM,
)

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

LONGEST_RESULT = 256 * 1024
"""Characters of JSON; a longer result is not recorded."""


class _Enclosing(NamedTuple):
    """The decorated function that this code runs in."""

    trace: Trace
    span_id: str
    recorded: str
    """The span of the recorded call that this one matches; its own where it matches none, inside which none will."""


_enclosing: ContextVar[_Enclosing | None] = ContextVar("agentlightning_replayed", default=None)


@overload
def replayed(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def replayed(*, name: str | None = None, ignore: Sequence[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@explained
def replayed(function: Any = None, /, *, name: str | None = None, ignore: Sequence[str] = ()) -> Any:
    """Let forks answer calls of a tool from the record, without running it: `@agl.replayed`, for `def` and `async def`.

    In an attempt each call runs the function and records its name, arguments and result. In a fork, a call with the
    same name and arguments gets the result of that time; of several such calls the first gets the first result, and so
    on. Where nothing is left that fits, the function runs. Outside of any attempt it is called as if it were not
    decorated.

    A result is recorded if it is None, text, a bool, a finite number, or a list or dict of such with text as keys, and
    has at most 256 KiB as JSON. For any other result, and for a call that raised, the function runs again in a fork.
    Arguments are compared in the same way: a call with others, such as a client or an object of yours, is not recorded
    and always runs. `ignore` names parameters that are not compared, `self` for one: their values must make no
    difference to the result.

    Functions are told apart by `name`, which is the function's own qualified name if it is not given. Raises
    ConfigError for a generator, and for a name in `ignore` that is no parameter.
    """
    if function is None:
        return lambda function: _decorated(function, name, ignore)
    return _decorated(function, name, ignore)


def _decorated(function: Any, name: str | None, ignore: Sequence[str]) -> Any:
    tool = _ReplayedTool(function, name, ignore)
    if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            call = tool.begin(args, kwargs)
            if call is None:
                return await function(*args, **kwargs)
            if call.is_answered:
                return call.answer()
            with call:
                return call.keep(await function(*args, **kwargs))

        return run_async

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        call = tool.begin(args, kwargs)
        if call is None:
            return function(*args, **kwargs)
        if call.is_answered:
            return call.answer()
        with call:
            return call.keep(function(*args, **kwargs))

    return run


class _ReplayedTool:
    """A decorated function: what it is called, and how its calls are compared."""

    def __init__(self, function: Any, name: str | None, ignore: Sequence[str]) -> None:
        if not callable(function) or isinstance(function, type):
            raise ConfigError(
                f"replayed decorates a def, not {function!r:.60}. Write @agl.replayed above it, or "
                "@agl.replayed(name='…')."
            )
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(f"replayed cannot decorate the generator {function.__qualname__}; let it return a list.")
        self.name = name or getattr(function, "__qualname__", type(function).__name__)
        self._signature = inspect.signature(function)
        self._ignored = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        known = self._signature.parameters
        if unknown := [one for one in self._ignored if one not in known]:
            raise ConfigError(f"{self.name} has no parameter {unknown[0]!r} to ignore; it has: {', '.join(known)}.")
        self._warned: set[str] = set()

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _ReplayableCall | None:
        """A call, where it is one of an attempt and can be recorded."""
        trace = current_trace()
        if trace is None or trace.closed:
            return None
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:  # the call itself will say so
            return None
        bound.apply_defaults()
        compared: list[str] = []
        for name, value in bound.arguments.items():
            text = None if name in self._ignored else self._text(name, value)
            if text is not None:
                compared.append(f'"{name}": {text}')
            elif name not in self._ignored and value is not self._signature.parameters[name].default:
                self.warn(
                    f"The argument {name!r} of {self.name} is a {type(value).__name__}, which JSON does not give back "
                    "as it is: such calls are not recorded, and run again in forks. Give text, numbers, lists or "
                    f"dicts; or ignore={[*self._ignored, name]!r}, if it makes no difference to the result."
                )
                return None
        return _ReplayableCall(self, trace, f"{{{', '.join(compared)}}}")

    def _text(self, name: str, value: Any) -> str | None:
        is_rest = self._signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        return exact_json(list(value) if is_rest else value, sort_keys=True)

    def warn(self, words: str) -> None:
        """Say it once."""
        if words not in self._warned:
            self._warned.add(words)
            logger.warning("%s (Said once.)", words)


class _ReplayableCall:
    """One call in an attempt: answered from the record, or run inside `with` and recorded."""

    def __init__(self, tool: _ReplayedTool, trace: Trace, arguments: str) -> None:
        self._tool = tool
        self._trace = trace
        self._outside = _enclosing.get()
        inside = self._outside if self._outside is not None and self._outside.trace is trace else None
        self._attributes: Attributes = {OPERATION_NAME: tool.name, OPERATION_INPUT: arguments, REPLAYABLE: False}
        if inside is not None:
            self._attributes[REPLAYABLE_INSIDE] = inside.span_id
        recorded_inside = None if inside is None else inside.recorded
        self._recorded = None if trace.tools is None else trace.tools.take(tool.name, arguments, recorded_inside)
        self._operation = OpenOperation(trace)

    @property
    def is_answered(self) -> bool:
        """Whether the record has a result for it."""
        return self._recorded is not None and self._recorded.result is not None

    def answer(self) -> Any:
        """The recorded result."""
        assert self._recorded is not None
        assert self._recorded.result is not None
        text = self._recorded.result
        found = {OPERATION_OUTPUT: text, REPLAYABLE: True, REPLAYED_FROM: self._recorded.span_id}
        self._operation.end({**self._attributes, **found})
        return json.loads(text)

    def keep(self, result: Any) -> Any:
        """Record the result, if it can be, and return it."""
        text = exact_json(result)
        if text is None:
            self._tool.warn(
                f"The result of {self._tool.name} is a {type(result).__name__}, which JSON does not give back as it "
                "is: it is not recorded, and forks run the function again. Return text, numbers, lists or dicts."
            )
        elif len(text) > LONGEST_RESULT:
            self._tool.warn(
                f"A result of {self._tool.name} is longer than {LONGEST_RESULT // 1024} KiB: it is not recorded, and "
                "forks run the function again. Return less, or keep it elsewhere and return where it is."
            )
        elif redacted(text) == text:  # the store keeps no key of an attempt whole
            self._attributes |= {OPERATION_OUTPUT: text, REPLAYABLE: True}
        return result

    def __enter__(self) -> Self:
        recorded = self._operation.span_id if self._recorded is None else self._recorded.span_id
        _enclosing.set(_Enclosing(self._trace, self._operation.span_id, recorded))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _enclosing.set(self._outside)
        failed = None if kind is None else SpanStatus(status_code="ERROR", description=kind.__name__)
        self._operation.end(self._attributes, failed)
