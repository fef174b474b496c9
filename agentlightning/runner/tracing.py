"""The trace around one attempt, whatever the tracer makes of it: tracers may be the user's own."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from typing import Any

from agentlightning.errors import ConfigError
from agentlightning.store.base import LightningStore
from agentlightning.tracer import Trace, Tracer
from agentlightning.types import Span


@asynccontextmanager
async def opened_trace(tracer: Tracer, store: LightningStore, rollout_id: str, attempt_id: str) -> AsyncIterator[Trace]:
    """The attempt's trace. Where the tracer's context gives something else, one of ours is opened inside it, and the
    spans that the tracer shows at the end are added to it.

    Raises ConfigError for a `trace_context` that is no context manager.
    """
    ids: dict[str, Any] = {"store": store, "rollout_id": rollout_id, "attempt_id": attempt_id}
    async with AsyncExitStack() as stack:
        given = await _enter(stack, tracer, tracer.trace_context(rollout_id, **ids))
        if isinstance(given, Trace):
            yield given
            return
        trace = await stack.enter_async_context(Tracer().trace_context(rollout_id, **ids))
        yield trace
        known = {span.span_id for span in trace.spans}
        for span in tracer.get_last_trace() or ():
            if isinstance(span, Span) and span.span_id not in known:
                trace.add(span.model_copy(update={"rollout_id": rollout_id, "attempt_id": attempt_id}))


async def _enter(stack: AsyncExitStack, tracer: Tracer, context: Any) -> Any:
    """Enter a context, async or not; a generator is taken as if it were decorated."""
    if inspect.isasyncgen(context):
        context = asynccontextmanager(lambda: context)()
    elif inspect.isgenerator(context):
        context = contextmanager(lambda: context)()
    if isinstance(context, AbstractAsyncContextManager):
        return await stack.enter_async_context(context)
    if isinstance(context, AbstractContextManager):
        return stack.enter_context(context)
    raise ConfigError(
        f"{type(tracer).__name__}.trace_context gives a {type(context).__name__}, which is no context manager. "
        "Write it as an async generator with @asynccontextmanager that yields once."
    )
