"""The names of `agentlightning.store`, and where each is loaded from when it is used."""

from agentlightning.store.base import (
    DEFAULT_LIMIT as DEFAULT_LIMIT,
    UNSET as UNSET,
    Capabilities as Capabilities,
    LightningStore as LightningStore,
    Statistics as Statistics,
    Unset as Unset,
)
from agentlightning.store.http.client import LightningStoreClient as LightningStoreClient
from agentlightning.store.http.server import LightningStoreServer as LightningStoreServer
from agentlightning.store.stores import (
    InMemoryLightningStore as InMemoryLightningStore,
    PostgresLightningStore as PostgresLightningStore,
    SqliteLightningStore as SqliteLightningStore,
)

__all__: list[str]
