"""The table of operations: what follows from it holds for every row."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from jsonschema import Draft202012Validator

from agentlightning.errors import StoreError
from agentlightning.store import LightningStore, LightningStoreClient, LightningStoreServer, SqliteLightningStore
from agentlightning.store.http.api import document
from agentlightning.store.http.table import BY_NAME, OPERATIONS, HttpOperation, find

OTHERWISE = {"enqueue_rollout", "dequeue_rollout", "wait_for_any_rollout", "get_latest_attempt", "add_span"} | {
    "add_otel_span",
    "close",
}
"""Methods of the protocol that others do over HTTP, or nobody."""
IDS = {"rollout_id": "ro-1", "attempt_id": "at-1", "resources_id": "rs-1", "worker_id": "w", "run_id": "r"}


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    store = SqliteLightningStore(tmp_path / "store.db")
    server = LightningStoreServer(store, port=0)
    await server.start()
    async with aiohttp.ClientSession(server.endpoint) as session:
        yield session
    await server.stop()
    await store.close()


def test_every_method_of_the_protocol_has_its_row() -> None:
    methods = {name for name, value in vars(LightningStore).items() if name[0] != "_" and callable(value)}
    assert methods - BY_NAME.keys() == OTHERWISE | {"otlp_traces_endpoint"}


@pytest.mark.parametrize("store", [LightningStoreClient, SqliteLightningStore])
def test_no_store_leaves_a_method_of_the_protocol_empty(store: type) -> None:
    made_of_others = {"dequeue_rollout", "get_latest_attempt", "add_otel_span"}
    for name, value in vars(LightningStore).items():
        if name[0] != "_" and name not in made_of_others:
            assert getattr(store, name) is not value, name
            if callable(value):
                assert inspect.signature(getattr(store, name)) == inspect.signature(value), name


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: f"{one.verb} {one.path}")
def test_a_path_leads_to_its_operation(operation: HttpOperation) -> None:
    found = find(operation.verb, operation.path.format(**IDS))
    assert found is not None
    assert found[0] is operation
    assert found[1] == {name: IDS[name] for name in re.findall(r"{(\w+)}", operation.path)}


_READ = [one for one in OPERATIONS if one.body not in (None, bytes) and one.name != "add_many_spans"]


@pytest.mark.parametrize("operation", _READ, ids=lambda one: f"{one.verb} {one.path}")
async def test_what_is_wrong_with_a_body_names_the_field(http: aiohttp.ClientSession, operation: HttpOperation) -> None:
    wrong: object = {"stauts": "1"}
    if str(operation.body).startswith("list["):
        wrong = [wrong]
    path = operation.path.format(**IDS)
    asks = operation.verb == "GET"
    query, body = ({"stauts": "1"}, None) if asks else (None, wrong)
    async with http.request(operation.verb, path, params=query, json=body) as response:
        assert response.status == 422
        assert re.search(r"\bstauts: |must be given|: Field required", (await response.json())["detail"])


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("enqueue_many_rollouts", {"rollouts": [{"input": 1}, {"inputs": 1}]}, "rollouts.1.inputs: "),
        ("enqueue_many_rollouts", {"rollouts": [{"input": 1, "config": {"max_attempts": 0}}]}, "config.max_attempts: "),
        ("start_rollout", {"input": 1, "config": {"max_attempts": 0}}, "config.max_attempts: "),
        ("start_rollout", {"input": 1, "mode": "trian"}, "mode: Invalid enum value 'trian'"),
        ("start_rollout", {"mode": "train"}, "input: it must be given"),
        ("dequeue_many_rollouts", {"timeout": 31}, "timeout: "),
        ("dequeue_many_rollouts", {"limit": 0}, "limit: "),
        ("update_attempts", [{"rollout_id": "r", "attempt_id": "a", "change": {"status": "x"}}], "0.change.status: "),
        ("query_rollouts", {"limit": -2}, "limit: "),
        ("begin_run", {"run": {"run_id": 1}}, "run.run_id: "),
        ("add_resources", {"resources": {"a": {}}}, "Resource 'a' has no resource_type"),
    ],
)
def test_errors_name_the_field_that_was_written(name: str, body: object, said: str) -> None:
    with pytest.raises(StoreError, match=re.escape(said)):
        BY_NAME[name].read(json.dumps(body).encode())


def test_what_a_body_leaves_out_is_left_to_the_method() -> None:
    assert BY_NAME["start_rollout"].read(b'{"input": null}').given() == {"input": None}
    worker = BY_NAME["update_worker"]
    assert worker.read(b'{"heartbeat_stats": null, "attempt_ids": null}').given() == {"attempt_ids": None}
    assert BY_NAME["update_rollout"].read(b'{"mode": null, "status": null}').given() == {"mode": None}


def test_the_document_is_whole() -> None:
    whole = document()
    schemas = whole["components"]["schemas"]
    referred = set(re.findall(r"#/components/schemas/([^\"]+)", json.dumps(whole)))
    assert referred - schemas.keys() == set()
    ids = [said["operationId"] for verbs in whole["paths"].values() for said in verbs.values()]
    assert len(ids) == len(set(ids)) == len(OPERATIONS)
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)


async def test_what_there_is_not_is_said(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/agl/rollout") as response:
        assert (response.status, response.content_type) == (404, "application/problem+json")
        assert "/docs" in (await response.json())["detail"]
    async with http.delete("/v1/agl/rollouts") as response:
        assert (response.status, response.headers["allow"]) == (405, "GET, POST")
    async with http.get("/docs") as response:
        text = await response.text()
    assert all(f"{one.verb} {one.path}</code>" in text for one in OPERATIONS)
