"""Stores for the tests: a real SQLite file, and the same one behind a real HTTP server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentlightning.store import LightningStore, LightningStoreClient, LightningStoreServer, SqliteLightningStore


@pytest.fixture(params=["sqlite", "http"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LightningStore]:
    opened = SqliteLightningStore(tmp_path / "store.db", watchdog_seconds=0.05)
    if request.param == "sqlite":
        yield opened
    else:
        server = LightningStoreServer(opened, port=0, admin_key="admin")
        await server.start()
        client = LightningStoreClient(server.endpoint, key="admin")
        yield client
        await client.close()
        await server.stop()
    await opened.close()
