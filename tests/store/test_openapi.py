"""schemathesis over the OpenAPI document: whatever is sent, the server does not fail."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store import SqliteLightningStore
from agentlightning.store.http.api import create_app
from agentlightning.store.http.attendance import Attendance
from agentlightning.store.http.hot import HotPaths
from agentlightning.store.http.intake import Intake


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_no_request_makes_the_server_fail(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    await asyncio.to_thread(_explore, store)
    await store.close()


def _explore(store: SqliteLightningStore) -> None:
    from hypothesis import HealthCheck, given, settings

    schemathesis = pytest.importorskip("schemathesis")  # here, because importing it takes two seconds

    @schemathesis.serializer("application/vnd.msgpack", "application/x-protobuf")
    def as_bytes(context: object, value: object) -> bytes:
        return value if isinstance(value, bytes) else str(value).encode()

    intake = Intake(store)
    schema = schemathesis.openapi.from_asgi(
        "/openapi.json", HotPaths(create_app(store, intake, Attendance(store)), store, intake)
    )
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 30
    for operation in operations:

        @settings(
            max_examples=15,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            database=None,
        )
        @given(case=operation.as_strategy())
        def explore(case: Any) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("timeout"), int | float):
                case.body["timeout"] %= 0.01  # long polls would take the test's time
            response = case.call()
            assert response.status_code < 500 or response.status_code == 503, (case, response.text)

        explore()
