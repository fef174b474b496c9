"""The trainer wires everything together and owns the lifecycles."""

from agentlightning import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__)
