"""Stores for the tests, all real: a SQLite file, the same behind an HTTP server, PostgreSQL where it is installed.

Every test of a store runs on each of them. The quick tests run all on SQLite, and over HTTP and on PostgreSQL
those that are marked `contract`: what differs between the three. The slow suite has the rest. What differs is

- transactions: what is written together is there whole or not at all, and what is repeated has one effect
- claims: each rollout has one owner, in turn, and deadlines and retries are counted by the store's clock
- notifications: who waits hears of what others wrote
- concurrency: the same at the same moment, many at once
- the wire and the columns: every value comes back as it was sent, errors are those of the protocol, pages fit together
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentlightning.store import (
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    PostgresLightningStore,
    SqliteLightningStore,
)
from tests.store.postgres_server import find_binaries, postgres_server

WATCHDOG_SECONDS = 0.05
FIXTURES = {"store": {"http", "postgres"}, "opened": {"postgres"}, "backend": {"http", "postgres"}}
"""By the name of a fixture: which of its stores the quick tests leave out where a test is not marked `contract`."""


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents or item.get_closest_marker("contract"):
            continue
        chosen = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if any(chosen.get(name) in others for name, others in FIXTURES.items()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def postgres_address() -> Iterator[str]:
    pytest.importorskip("psycopg")
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed")
    with postgres_server(binaries) as address:
        yield address


@pytest.fixture
def postgres_dsn(postgres_address: str) -> str:
    """An empty database."""
    import psycopg

    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(postgres_address, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return postgres_address.replace("/postgres?", f"/{name}?")


@asynccontextmanager
async def over_http(tmp_path: Path) -> AsyncIterator[LightningStore]:
    store = SqliteLightningStore(tmp_path / "store.db", watchdog_seconds=WATCHDOG_SECONDS)
    server = LightningStoreServer(store, port=0, admin_key="admin")
    await server.start()
    client = LightningStoreClient(server.endpoint, key="admin")
    yield client
    await client.close()
    await server.stop()
    await store.close()


@pytest.fixture(params=["sqlite", "http", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LightningStore]:
    if request.param == "http":
        async with over_http(tmp_path) as client:
            yield client
        return
    opened = (
        SqliteLightningStore(tmp_path / "store.db", watchdog_seconds=WATCHDOG_SECONDS)
        if request.param == "sqlite"
        else PostgresLightningStore(request.getfixturevalue("postgres_dsn"), watchdog_seconds=WATCHDOG_SECONDS)
    )
    yield opened
    await opened.close()
