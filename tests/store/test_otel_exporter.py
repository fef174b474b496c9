"""The OpenTelemetry SDK's own exporter, unchanged, sends spans to the server, and they come back complete."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, SpanKind, Status, StatusCode

from agentlightning.store import LightningStoreServer, SqliteLightningStore


def _record(endpoint: str, headers: dict[str, str], rollout_id: str, attempt_id: str, compression: Compression) -> None:
    resource = Resource(
        {"agentlightning.rollout_id": rollout_id, "agentlightning.attempt_id": attempt_id, "host": "h1"}
    )
    provider = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(endpoint=endpoint, headers=headers, compression=compression)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer("my-agent")
    with tracer.start_as_current_span("plan", kind=SpanKind.INTERNAL) as plan:
        plan.set_attributes(
            {"text": "ünïcode", "n": 3, "ratio": 0.5, "ok": True, "many": ["a", "b"], "long": "x" * 50_000}
        )
        plan.add_event("looked", {"at": "the sky"})
        with tracer.start_as_current_span("tool", links=[Link(plan.get_span_context(), {"why": "test"})]) as tool:
            tool.set_status(Status(StatusCode.ERROR, "broke"))
    for number in range(1000):
        with tracer.start_as_current_span(f"step {number}"):
            pass
    assert provider.force_flush()
    provider.shutdown()


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip])
@pytest.mark.quick_with("Gzip")
async def test_the_sdk_exporter(tmp_path: Path, compression: Compression) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    server = LightningStoreServer(store, port=0, admin_key="admin", secret=b"0" * 32)
    await server.start()
    claim = await store.start_rollout("task")
    own = claim.rollout_id, claim.attempt.attempt_id
    key = server.key_for(*own, ("spans",))
    headers = {"Authorization": f"Bearer {key}"}
    await asyncio.to_thread(_record, server.otlp_traces_endpoint(), headers, *own, compression)
    spans = {span.name: span for span in await store.query_spans(own[0])}
    await server.stop()
    await store.close()
    assert len(spans) == 1002
    plan, tool = spans["plan"], spans["tool"]
    assert plan.attributes == {
        "text": "ünïcode", "n": 3, "ratio": 0.5, "ok": True, "many": ["a", "b"], "long": "x" * 50_000
    }  # fmt: skip
    assert [(event.name, event.attributes) for event in plan.events] == [("looked", {"at": "the sky"})]
    assert tool.parent_id == plan.span_id
    assert tool.trace_id == plan.trace_id
    assert (tool.status.status_code, tool.status.description) == ("ERROR", "broke")
    assert tool.links[0].context.span_id == plan.span_id
    assert tool.resource.attributes["host"] == "h1"
    assert plan.start_time is not None
    assert plan.start_time <= tool.start_time <= tool.end_time <= plan.end_time  # pyright: ignore[reportOptionalOperand, reportOperatorIssue]
    assert sorted(span.sequence_id for span in spans.values()) == list(range(1, 1003))
