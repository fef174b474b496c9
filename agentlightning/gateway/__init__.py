"""The gateway: the only thing an agent talks to.

gateway     the object that owns the parts, and its life      attempts    whose calls these are
exchange    one request and its answer, in neutral form           limits      what one request may be at most
serving/    over HTTP: paths, keys, streams, disconnects      dialects/   the wire formats
sampling/   prompt → engine → message → record                history/    exact tokens of an attempt, branching
recording/  calls as spans, written to the store in batches   routing/    what names of models mean; other providers
large/      large requests, in a process of their own

Names are loaded when they are used: the process for large requests starts without the store, HTTP and providers.
"""

from __future__ import annotations

from agentlightning import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__)
