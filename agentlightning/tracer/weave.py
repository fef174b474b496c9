"""`WeaveTracer`: the calls of Weights & Biases' `weave` as spans, without its account or its server."""

# Optional packages, which the checks run without.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
from typing import Any

from agentlightning.arguments import explained_class
from agentlightning.errors import missing_extra
from agentlightning.tracer.base import FLUSH_SECONDS
from agentlightning.tracer.otel import OtelTracer

logger = logging.getLogger(__name__)

_client: Any = None


@explained_class
class WeaveTracer(OtelTracer):
    """Collects the calls of functions decorated with `weave.op`, of the libraries that weave patches, and the spans of
    the global OpenTelemetry provider. The agent leaves out `weave.init`, which logs in to a server.

    Needs the package `weave` (the extra of that name).
    """

    def __init__(self, *, flush_seconds: float = FLUSH_SECONDS) -> None:
        super().__init__(flush_seconds=flush_seconds)
        try:
            import weave  # noqa: F401
        except ImportError as error:
            raise missing_extra("weave", "weave") from error

    def init(self) -> None:
        super().init()
        global _client
        if _client is None:
            _client = _start()

    def teardown(self) -> None:
        from weave.integrations.patch import unregister_import_hook
        from weave.trace.context.weave_client_context import get_weave_client, set_weave_client_global

        global _client
        if _client is not None:
            unregister_import_hook()
            if get_weave_client() is _client:
                set_weave_client_global(None)
            _client = None
        super().teardown()


def _start() -> Any:
    """Make the client that weave's operations report to, the way `weave.init` would, and patch libraries."""
    from weave.integrations.patch import implicit_patch, register_import_hook
    from weave.trace.context.weave_client_context import get_weave_client, set_weave_client_global

    from agentlightning.tracer.weave_client import SpanClient

    known = get_weave_client()
    if known is not None:
        logger.warning("weave.init was called: its calls go to its own server, not to the traces of attempts.")
        return known
    client = SpanClient()
    set_weave_client_global(client)
    implicit_patch()
    register_import_hook()
    return client
