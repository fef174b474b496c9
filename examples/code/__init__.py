"""A coding agent: its tasks, its sandbox, and what it earns."""
