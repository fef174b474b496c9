"""The store: the only truth about rollouts, attempts, spans, calls, resources and workers."""

from agentlightning.store.base import DEFAULT_LIMIT, UNSET, Capabilities, LightningStore, Statistics, Unset
from agentlightning.store.sql import InMemoryLightningStore, SqliteLightningStore

__all__ = [
    "DEFAULT_LIMIT",
    "UNSET",
    "Capabilities",
    "InMemoryLightningStore",
    "LightningStore",
    "SqliteLightningStore",
    "Statistics",
    "Unset",
]
