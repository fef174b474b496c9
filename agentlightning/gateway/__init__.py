"""The gateway: the only thing an agent talks to.

gateway     the object that owns the parts, and its life      attempts    whose calls these are
exchange    one request and its answer, in neutral form           limits      what one request may be at most
serving/    over HTTP: paths, keys, streams, disconnects      dialects/   the wire formats
sampling/   prompt → engine → message → record                history/    exact tokens of an attempt, branching
recording/  calls as spans, written to the store in batches   routing/    what names of models mean; other providers
large/      large requests, in a process of their own

Names are loaded when they are used: the process for large requests starts without the store, HTTP and providers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentlightning.gateway.attempts import AttemptSummary
    from agentlightning.gateway.dialects import DIALECTS, Dialect
    from agentlightning.gateway.gateway import Gateway
    from agentlightning.gateway.limits import RequestLimits
    from agentlightning.gateway.routing.models import Frozen, Trained
    from agentlightning.gateway.routing.spending import SpendingLimits, TokenPrice
    from agentlightning.gateway.routing.upstream import Provider
    from agentlightning.rendering import Rendering, load_rendering

_HOMES: dict[str, str] = {
    "DIALECTS": "agentlightning.gateway.dialects",
    "AttemptSummary": "agentlightning.gateway.attempts",
    "Dialect": "agentlightning.gateway.dialects",
    "Frozen": "agentlightning.gateway.routing.models",
    "Gateway": "agentlightning.gateway.gateway",
    "Provider": "agentlightning.gateway.routing.upstream",
    "Rendering": "agentlightning.rendering",
    "RequestLimits": "agentlightning.gateway.limits",
    "SpendingLimits": "agentlightning.gateway.routing.spending",
    "TokenPrice": "agentlightning.gateway.routing.spending",
    "Trained": "agentlightning.gateway.routing.models",
    "load_rendering": "agentlightning.rendering",
}

__all__ = [
    "DIALECTS",
    "AttemptSummary",
    "Dialect",
    "Frozen",
    "Gateway",
    "Provider",
    "Rendering",
    "RequestLimits",
    "SpendingLimits",
    "TokenPrice",
    "Trained",
    "load_rendering",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
