"""The names of `agentlightning.metrics`, and where each is loaded from when it is used."""

from agentlightning.metrics.console import (
    Console as Console,
    RichConsole as RichConsole,
    SilentConsole as SilentConsole,
)
from agentlightning.metrics.plot import plot_curve as plot_curve
from agentlightning.metrics.sink import (
    JsonlSink as JsonlSink,
    Reporter as Reporter,
    Sink as Sink,
    read_metrics as read_metrics,
)
from agentlightning.metrics.store import StoreSink as StoreSink

__all__: list[str]
