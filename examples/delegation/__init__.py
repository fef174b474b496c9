"""Codex with a sub-agent that alone is trained; see README.md."""
