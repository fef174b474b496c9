"""What a run tells about itself: metrics per step to files and the terminal, and the curve as a picture."""

from agentlightning import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__)
