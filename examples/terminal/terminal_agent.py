"""Codex, as it is published, as an agent: it is given a task, an endpoint and its own configuration files."""

from __future__ import annotations

from .program import make_agent

terminal_agent = make_agent()
