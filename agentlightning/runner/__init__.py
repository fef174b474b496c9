"""Runners claim rollouts from the store, execute the agent, and report what happened."""

from agentlightning import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__)
