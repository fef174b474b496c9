"""An operation: a piece of the agent's work as a span with a start, an end, an input and an output.

    @operation                                   records arguments and result of a function, sync or async
    with operation("search", query=query) as op: records a block; op.set_output(hits)

Spans that start inside, also those of instrumented libraries, become its children. An exception passes through and is
recorded.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, overload

from opentelemetry import context as otel_context

from agentlightning.emitter.record import error_status, exception_attributes, json_or_repr, plain, trace_for
from agentlightning.errors import ConfigError
from agentlightning.tracer.trace import Trace, current_parent, current_trace
from agentlightning.types import Attributes, Span, SpanStatus
from agentlightning.types.ids import random_hex
from agentlightning.types.names import OPERATION, OPERATION_INPUT, OPERATION_NAME, OPERATION_OUTPUT

P = ParamSpec("P")
R = TypeVar("R")


class Operation:
    """One operation: enter it once, with `with` or `async with`; or use it as a decorator any number of times."""

    def __init__(self, name: str | None, attributes: Mapping[str, Any]) -> None:
        self._name = name
        self._given = dict(attributes)
        self._attributes: Attributes = {}
        self._running: OpenOperation | None = None

    def set_attributes(self, **attributes: Any) -> None:
        """Attach attributes to the span."""
        self._attributes.update(plain(attributes))

    def set_input(self, *values: Any, **named: Any) -> None:
        """Record what the operation works on: one value, or several by name. What JSON cannot hold is recorded as its
        repr.
        """
        one = len(values) == 1 and not named
        self._put(OPERATION_INPUT, values[0] if one else {**({"args": values} if values else {}), **named})

    def set_output(self, value: Any) -> None:
        """Record what came out. What JSON cannot hold is recorded as its repr."""
        self._put(OPERATION_OUTPUT, value)

    def _put(self, key: str, value: Any) -> None:
        if current_trace() is not None:
            self._attributes[key] = json_or_repr(value)

    def __enter__(self) -> Self:
        trace = trace_for("operation")
        if self._running is not None:
            raise ConfigError("This operation was entered already; make one with operation(…) for each block.")
        self._attributes.update(plain(self._given))
        if trace is not None:
            self._running = OpenOperation(trace)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._running is not None:
            named = {OPERATION_NAME: self._name or "operation"}
            failure = {} if error is None else exception_attributes(error)
            status = None if error is None else error_status(error)
            self._running.end({**self._attributes, **named, **failure}, status)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, tb)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, with every call of it recorded as an operation of its own."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(
                f"operation cannot decorate the generator {function.__qualname__}; use `with operation(…)`."
            )
        name = self._name or function.__qualname__
        signature = inspect.signature(function)

        def start(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation:
            one = Operation(name, self._given)
            one.set_input(_arguments(signature, args, kwargs))
            return one

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                with start(args, kwargs) as one:
                    result = await function(*args, **kwargs)
                    one.set_output(result)
                    return result

            return run_async  # pyright: ignore[reportReturnType]

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with start(args, kwargs) as one:
                result = function(*args, **kwargs)
                one.set_output(result)
                return result

        return run


@overload
def operation(name: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def operation(what: str | None = None, /, *, name: str | None = None, **attributes: Any) -> Operation: ...
def operation(what: Callable[..., Any] | str | None = None, /, *, name: str | None = None, **attributes: Any) -> Any:
    """`@operation`, `@operation("name", key=value)` or `with operation(name="name", key=value):`

    Raises ConfigError for two different names.
    """
    if callable(what):
        return Operation(name, attributes)(what)
    if what is not None and name is not None and what != name:
        raise ConfigError(f"The operation has two names: '{what}' and name='{name}'. Give one of them.")
    return Operation(what if name is None else name, attributes)


class OpenOperation:
    """The span of an operation between its start and its end."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._trace_id, self._parent_id = current_parent(trace)
        self.span_id = random_hex(8)
        self._start_time = time.time()
        self._outside = otel_context.get_current()
        otel_context.attach(trace.parent_context(self.span_id, self._trace_id))

    def end(self, attributes: Attributes, status: SpanStatus | None = None) -> None:
        """Record the span, which ends now."""
        otel_context.attach(self._outside)
        span = Span.from_attributes(
            attributes=attributes,
            rollout_id=self._trace.rollout_id,
            attempt_id=self._trace.attempt_id,
            name=OPERATION,
            trace_id=self._trace_id,
            span_id=self.span_id,
            parent_id=self._parent_id,
            start_time=self._start_time,
            status=status,
        )
        self._trace.add(span)


def _arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call by name; as they came when they do not fit (the call itself will say so)."""
    try:
        return dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        return {"args": args, "kwargs": kwargs}
