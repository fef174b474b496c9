"""What the gateway's package gives to others, and where each name is loaded from when it is used."""

from agentlightning.gateway.attempts import AttemptSummary as AttemptSummary
from agentlightning.gateway.dialects import DIALECTS as DIALECTS, Dialect as Dialect
from agentlightning.gateway.gateway import Gateway as Gateway
from agentlightning.gateway.limits import RequestLimits as RequestLimits
from agentlightning.gateway.routing.models import Frozen as Frozen, Trained as Trained
from agentlightning.gateway.routing.spending import SpendingLimits as SpendingLimits, TokenPrice as TokenPrice
from agentlightning.gateway.routing.upstream import Provider as Provider
from agentlightning.rendering import Rendering as Rendering, load_rendering as load_rendering

__all__: list[str]
