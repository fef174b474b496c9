"""The gateway: the only thing an agent talks to.

gateway     the object that owns the parts, and its life      attempts    whose calls these are
exchange    one request and its answer, in neutral form           limits      what one request may be at most
serving/    over HTTP: paths, keys, streams, disconnects      dialects/   the wire formats
sampling/   prompt → engine → message → record                history/    exact tokens of an attempt, branching
recording/  calls as spans, written to the store in batches   routing/    what names of models mean; other providers
"""

from __future__ import annotations

from agentlightning.gateway.attempts import AttemptSummary
from agentlightning.gateway.dialects import DIALECTS, Dialect
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.limits import RequestLimits
from agentlightning.gateway.routing.models import Frozen, Trained
from agentlightning.gateway.routing.spending import SpendingLimits, TokenPrice
from agentlightning.gateway.routing.upstream import Provider
from agentlightning.rendering import Rendering, load_rendering

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
