"""Rewards have a range, whichever way they come in; one outside it is the trouble of its attempt alone."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable
from statistics import fmean
from typing import Any

import aiohttp
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

import agentlightning as agl
from agentlightning.algorithm.episode import collect, mean_reward
from agentlightning.errors import StoreError, VariableError
from agentlightning.gateway import Gateway
from agentlightning.keys import ALL_SCOPES
from agentlightning.litagent import LitAgent, Program
from agentlightning.store import InMemoryLightningStore, LightningStoreServer
from agentlightning.store.transfer.records import from_line, to_line
from agentlightning.types import AttemptedRollout, AttemptStatus, Outcome, Span, Triplet
from agentlightning.types.names import ATTEMPT_ID, REWARD, ROLLOUT_ID
from agentlightning.types.reward import LARGEST, checked_reward, largest_reward
from tests.gateway.conftest import rendering  # noqa: F401 (a fixture)
from tests.gateway.scripted import ScriptedEngine
from tests.litagent.test_isolation import Place

NUMBERS: list[Any] = [1e308, -1e308, 1000001, 10**400, -(10**400), float("nan"), float("inf")]
TEXTS = [
    "1e308",
    "-1e308",
    "1000001",
    "1" + "0" * 400,
    "NaN",
    "Infinity",
    "true",
    '"1"',
    "null",
    "[1]",
    "1" + "0" * 5000,
]
KEY = f"{REWARD}.0.value"


@pytest.fixture
async def place(rendering: Any) -> AsyncIterator[Place]:  # noqa: F811
    store = InMemoryLightningStore()
    async with Gateway(store, ScriptedEngine(rendering, lambda prompt, params: "7"), rendering) as gateway:
        yield Place(store, gateway)
    await store.close()


def returned(value: Any) -> LitAgent[Any]:
    return agl.rollout(lambda task: value)


def emitted(value: Any) -> LitAgent[Any]:
    return agl.rollout(lambda task: agl.emit_reward(value) and None)


def named(value: Any) -> LitAgent[Any]:
    return agl.rollout(lambda task: agl.emit_reward({"a": 1.0, "b": value}, primary_key="a") and None)


def of_a_triplet(value: Any) -> LitAgent[Any]:
    return agl.rollout(lambda task: [Triplet(prompt="?", response="!", reward=value)])


def of_a_span(value: Any) -> LitAgent[Any]:
    return agl.rollout(
        lambda task: [Span.from_attributes(name="x", attributes={KEY: value}, rollout_id="r", attempt_id="a")]
    )


@pytest.mark.quick_with("1e+308-")
@pytest.mark.parametrize("way", [returned, emitted, named, of_a_triplet, of_a_span])
@pytest.mark.parametrize("value", [*NUMBERS, "1"])
async def test_of_an_agent_in_this_process(place: Place, way: Callable[[Any], LitAgent[Any]], value: Any) -> None:
    if way is of_a_triplet and value == "1":
        value = "one"
    rollout = await place.run(way(value))
    assert rollout.attempt.outcome is Outcome.AGENT_ERROR
    assert rollout.attempt.error
    assert await place.reward(rollout) is None


def printed(text: str) -> dict[str, Any]:
    return {"command": [sys.executable, "-S", "-c", f"print({text!r})"], "reward": "last_line"}


def printed_in_json(text: str) -> dict[str, Any]:
    return {
        "command": [sys.executable, "-S", "-c", "print(" + repr(f'{{"reward": {text}}}') + ")"],
        "reward": "last_line",
    }


def in_a_file(text: str) -> dict[str, Any]:
    writing = f"import os; open(os.environ['AGL_REWARD_FILE'], 'w').write({text!r})"
    return {"command": [sys.executable, "-S", "-c", writing], "reward": "file"}


def by_a_grader(text: str) -> dict[str, Any]:
    return {"command": "true", "grader": [sys.executable, "-S", "-c", f"print({text!r})"]}


@pytest.mark.slow
@pytest.mark.quick_with("in_a_file")
@pytest.mark.parametrize("way", [printed, printed_in_json, in_a_file, by_a_grader])
async def test_of_a_program(place: Place, way: Callable[[str], dict[str, Any]]) -> None:
    for text in TEXTS:
        given = way(text)
        rollout = await place.run(Program(given.pop("command"), **given))
        expected = Outcome.JUDGE_ERROR if "grader" in given else Outcome.AGENT_ERROR
        assert rollout.attempt.outcome is expected, text[:20]
        assert await place.reward(rollout) is None


@pytest.mark.parametrize("value", [*NUMBERS, "1", None])
async def test_of_a_grader_in_this_process(place: Place, value: Any) -> None:
    rollout = await place.run(Program("true", grader=lambda run: value))
    assert rollout.attempt.outcome is Outcome.JUDGE_ERROR
    assert await place.reward(rollout) is None


async def test_over_http(place: Place) -> None:
    claimed = await place.store.start_rollout(input={})
    ids = claimed.rollout_id, claimed.attempt.attempt_id
    headers = {"authorization": f"Bearer {place.gateway.key_for(*ids)}", "content-type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for text in TEXTS:
            body = f'{{"reward": {text}}}'
            async with session.post(f"{place.gateway.endpoint}/reward", data=body) as answer:
                assert answer.status == 400, text[:20]
        async with session.post(f"{place.gateway.endpoint}/reward", data='{"reward": 1000000}') as answer:
            assert answer.status == 200


def otlp(claimed: AttemptedRollout, **value: Any) -> bytes:
    export = ExportTraceServiceRequest()
    span = export.resource_spans.add().scope_spans.add().spans.add(name="x", trace_id=b"1" * 16, span_id=b"1" * 8)
    for key, text in ((ROLLOUT_ID, claimed.rollout_id), (ATTEMPT_ID, claimed.attempt.attempt_id)):
        span.attributes.add(key=key).value.string_value = text
    found = span.attributes.add(key=KEY).value
    for kind, given in value.items():
        setattr(found, kind, given)
    return export.SerializeToString()


async def test_in_spans_from_elsewhere() -> None:
    store = InMemoryLightningStore()
    server = LightningStoreServer(store, port=0, admin_key="admin", secret=b"s" * 32)
    await server.start()
    claimed = await store.start_rollout("task")
    key = server.key_for(claimed.rollout_id, claimed.attempt.attempt_id, ALL_SCOPES)
    span = Span.from_attributes(
        name="x", attributes={}, rollout_id=claimed.rollout_id, attempt_id=claimed.attempt.attempt_id
    ).model_dump(mode="json")
    async with aiohttp.ClientSession(server.endpoint, headers={"Authorization": f"Bearer {key}"}) as session:
        for text in TEXTS:
            whole = json.dumps([{**span, "attributes": {KEY: "VALUE"}}]).replace('"VALUE"', text)
            headers = {"content-type": "application/json"}
            async with session.post("/v1/agl/spans", data=whole, headers=headers) as answer:
                assert answer.status == 422, text[:20]
        for value in ({"double_value": 1e308}, {"int_value": 2**60}, {"bool_value": True}, {"string_value": "1"}):
            headers = {"content-type": "application/x-protobuf"}
            async with session.post("/v1/traces", data=otlp(claimed, **value), headers=headers) as answer:
                said = ExportTraceServiceResponse.FromString(await answer.read())
                assert (answer.status, said.partial_success.rejected_spans) == (200, 1), value
    assert not (await store.query_spans(claimed.rollout_id)).items
    await server.stop()
    await store.close()


async def put(store: InMemoryLightningStore, value: Any) -> str:
    """A finished rollout whose span an admin wrote."""
    claimed = await store.start_rollout("task")
    rollout_id, attempt_id = claimed.rollout_id, claimed.attempt.attempt_id
    span = Span.from_attributes(name=REWARD, attributes={KEY: value}, rollout_id=rollout_id, attempt_id=attempt_id)
    await store.add_span(span)
    await store.update_attempt(rollout_id, attempt_id, status=AttemptStatus.SUCCEEDED, outcome=Outcome.OK)
    return claimed.rollout_id


async def test_what_an_admin_wrote_is_left_out_where_it_is_read() -> None:
    """Two of them ended a run when their mean was taken."""
    store = InMemoryLightningStore()
    rollouts = [await put(store, value) for value in (1e308, 1e308, -1e308, True, "1", 0.5)]
    episodes = await collect(store, rollouts)
    assert [e.reward for e in episodes] == [None, None, None, None, None, 0.5]
    assert mean_reward(episodes) == 0.5
    await store.close()


async def test_of_an_import() -> None:
    store, other = InMemoryLightningStore(), InMemoryLightningStore()
    await put(store, 0.5)
    lines = [to_line(record) async for record in store.export_records()]
    for text in ("1e308", "1" + "0" * 400, "true", '"1"'):
        with pytest.raises(StoreError):
            await other.import_records([from_line(lines[0].replace(b"0.5", text.encode()))])
    assert await other.import_records([from_line(lines[0])]) == 1
    await store.close()
    await other.close()


def test_sums_of_rewards_are_finite() -> None:
    assert np.isfinite(fmean([largest_reward(), largest_reward()]))
    assert [checked_reward(v) for v in (1e6, -1e6, True, np.float32(0.5), np.bool_(1))] == [1e6, -1e6, 1.0, 0.5, 1.0]


def test_the_range_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LARGEST, "1e9")
    assert checked_reward(1e9) == 1e9
    for nonsense in ("much", "0", "-1", "nan", "inf", "1e200"):
        monkeypatch.setenv(LARGEST, nonsense)
        with pytest.raises(VariableError):
            largest_reward()
