"""The store: the only truth about rollouts, attempts, spans, calls, resources and workers."""

from agentlightning import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__)
