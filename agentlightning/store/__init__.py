"""The store: the only truth about rollouts, attempts, spans, calls, resources and workers."""

from typing import TYPE_CHECKING, Any

from agentlightning.store.base import DEFAULT_LIMIT, UNSET, Capabilities, LightningStore, Statistics, Unset
from agentlightning.store.stores import InMemoryLightningStore, PostgresLightningStore, SqliteLightningStore

if TYPE_CHECKING:
    from agentlightning.store.http.client import LightningStoreClient
    from agentlightning.store.http.server import LightningStoreServer

__all__ = [
    "DEFAULT_LIMIT",
    "UNSET",
    "Capabilities",
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreClient",
    "LightningStoreServer",
    "PostgresLightningStore",
    "SqliteLightningStore",
    "Statistics",
    "Unset",
]


def __getattr__(name: str) -> Any:
    # The web framework and the HTTP client are imported only by those who serve a store or connect to one.
    if name == "LightningStoreClient":
        from agentlightning.store.http.client import LightningStoreClient

        return LightningStoreClient
    if name == "LightningStoreServer":
        from agentlightning.store.http.server import LightningStoreServer

        return LightningStoreServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
