"""Stores for the tests: real SQLite files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentlightning.store import LightningStore, SqliteLightningStore


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LightningStore]:
    opened = SqliteLightningStore(tmp_path / "store.db", watchdog_seconds=0.05)
    yield opened
    await opened.close()
