"""What a run tells about itself: metrics per step to files and the terminal, and the curve as a picture."""

from agentlightning.metrics.console import Console, RichConsole, SilentConsole
from agentlightning.metrics.jsonl import JsonlSink, read_metrics
from agentlightning.metrics.plot import plot_curve
from agentlightning.metrics.reporter import Reporter
from agentlightning.metrics.sink import Sink
from agentlightning.metrics.store import StoreSink

__all__ = [
    "Console",
    "JsonlSink",
    "Reporter",
    "RichConsole",
    "SilentConsole",
    "Sink",
    "StoreSink",
    "plot_curve",
    "read_metrics",
]
