"""Algorithms decide what to run and what to learn from it."""

from agentlightning import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__)
