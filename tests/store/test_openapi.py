"""schemathesis over the OpenAPI document: whatever is sent, the server does not fail."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentlightning.store import SqliteLightningStore
from scripts.fuzz import explore_store


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_no_request_makes_the_server_fail(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    store, found = SqliteLightningStore(tmp_path / "store.db"), list[tuple[str, str]]()
    answers = await asyncio.to_thread(explore_store, store, examples=15, found=lambda *one: found.append(one))
    await store.close()
    assert found == []
    assert answers.total() > 300
