"""The names of `agentlightning.metrics`, and where each is loaded from when it is used."""

from agentlightning.metrics.console import (
    Console as Console,
    RichConsole as RichConsole,
    SilentConsole as SilentConsole,
)
from agentlightning.metrics.jsonl import JsonlSink as JsonlSink, read_metrics as read_metrics
from agentlightning.metrics.plot import plot_curve as plot_curve
from agentlightning.metrics.reporter import Reporter as Reporter
from agentlightning.metrics.sink import Sink as Sink
from agentlightning.metrics.store import StoreSink as StoreSink

__all__: list[str]
