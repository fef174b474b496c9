"""`agentlightning.utils` was a package without names of its own; see `otel` and the table."""
