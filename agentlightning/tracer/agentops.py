"""`AgentOpsTracer`: what the `agentops` library instruments and decorates, without its account or its server."""

# Optional packages, which the checks run without.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

from opentelemetry import trace as otel_trace
from opentelemetry.sdk.trace import TracerProvider

from agentlightning.arguments import explained_class
from agentlightning.errors import missing_extra
from agentlightning.tracer.base import FLUSH_SECONDS
from agentlightning.tracer.otel import OtelTracer
from agentlightning.tracer.trace import Trace

logger = logging.getLogger(__name__)


@explained_class
class AgentOpsTracer(OtelTracer):
    """Collects the spans of AgentOps' instrumentation and decorators, and all others of the global provider, inside one
    span for the whole trace, as AgentOps has its sessions.

    Nothing leaves the process. A class that derives from this one does what `OtelTracer` does where the package
    `agentops` (the extra of that name) is missing: enough for frameworks that record spans themselves.

    Raises ConfigError without that package, when it is made.
    """

    def __init__(self, *, flush_seconds: float = FLUSH_SECONDS) -> None:
        if type(self) is AgentOpsTracer and find_spec("agentops") is None:
            raise missing_extra("agentops", "agentops")
        super().__init__(flush_seconds=flush_seconds)

    def init(self) -> None:
        super().init()
        _instrument()

    @asynccontextmanager
    async def trace_context(self, name: str | None = None, **of_attempt: Any) -> AsyncIterator[Trace]:
        title = name or of_attempt.get("rollout_id")
        async with super().trace_context(name, **of_attempt) as trace:
            if title is None or find_spec("agentops") is None:
                yield trace
                return
            attributes = {"agentops.span.kind": "session", "operation.name": title}
            with otel_trace.get_tracer("agentops").start_as_current_span(f"{title}.session", attributes=attributes):
                yield trace

    def teardown(self) -> None:
        _uninstrument()
        super().teardown()


def _instrument() -> None:
    """Start AgentOps' instrumentation on the global provider, unless the application did so with `agentops.init`."""
    # Otherwise AgentOps writes a log file into the working directory.
    os.environ.setdefault("AGENTOPS_LOGGING_TO_FILE", "false")
    try:
        from agentops.instrumentation import instrument_all
        from agentops.sdk.core import tracer
    except ImportError:
        logger.info("The package 'agentops' is not installed: only spans that libraries record themselves are seen.")
        return
    provider = otel_trace.get_tracer_provider()
    if tracer.initialized or not isinstance(provider, TracerProvider):
        return
    # What its own `initialize` does, except for the exporters, which would call its server.
    tracer.provider = provider
    tracer._config = {"service_name": "agentops"}
    tracer._initialized = True
    instrument_all()


def _uninstrument() -> None:
    try:
        from agentops.instrumentation import uninstrument_all
        from agentops.sdk.core import tracer
    except ImportError:
        return
    if tracer._config == {"service_name": "agentops"}:
        uninstrument_all()
        tracer._initialized = False
