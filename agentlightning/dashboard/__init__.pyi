"""The names of `agentlightning.dashboard`, and where each is loaded from when it is used."""

from agentlightning.dashboard.app import (
    Dashboard as Dashboard,
    dashboard_url as dashboard_url,
    served_with_dashboard as served_with_dashboard,
)

__all__: list[str]
