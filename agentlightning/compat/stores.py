"""What older scripts asked of stores besides their methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from agentlightning.store.base import LightningStore
from agentlightning.store.http.client import LightningStoreClient
from agentlightning.store.http.server import LightningStoreServer
from agentlightning.types import FINISHED_ROLLOUT, Rollout, RolloutStatus

Store = TypeVar("Store", bound=LightningStore)


def LightningStoreThreaded(store: Store) -> Store:
    """The store itself: every store may be used from any thread and any event loop."""
    return store


def is_queuing(rollout: Rollout) -> bool:
    """Whether it waits to be claimed."""
    return rollout.status in (RolloutStatus.QUEUING, RolloutStatus.REQUEUING)


def is_running(rollout: Rollout) -> bool:
    """Whether it was claimed and has not ended."""
    return rollout.status in (RolloutStatus.PREPARING, RolloutStatus.RUNNING)


def is_finished(rollout: Rollout) -> bool:
    """Whether it has ended."""
    return rollout.status in FINISHED_ROLLOUT


def of_server(self: LightningStoreServer, name: str) -> Any:
    """A server was a store itself: what it lacks is asked of the store that it serves."""
    if name.startswith("_") or not hasattr(LightningStore, name):
        raise AttributeError(f"'LightningStoreServer' object has no attribute '{name}'")
    if name == "capabilities":
        return {**self.store.capabilities, "otlp_traces": True}
    return getattr(self.store, name)


def as_client(self: LightningStoreServer) -> tuple[Callable[..., LightningStoreClient], tuple[str, str | None]]:
    """How a server is pickled: what another process gets is a client of it."""
    return LightningStoreClient, (self.endpoint, self.admin_key)


def retry_delays(arguments: dict[str, Any], value: Sequence[float]) -> None:
    """`retry_delays=(1, 2, 5)` tried again for eight seconds in all."""
    arguments.setdefault("retry_seconds", float(sum(value)))


def _address(self: LightningStoreClient) -> str:
    """Where the server is."""
    return self._given[0]  # pyright: ignore[reportPrivateUsage]


server_address = property(_address)
