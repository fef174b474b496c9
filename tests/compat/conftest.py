"""These tests use older names on purpose: the notice at the end of their own process would say nothing to anybody."""

from __future__ import annotations

from agentlightning.compat import notice

notice.logger.disabled = True
