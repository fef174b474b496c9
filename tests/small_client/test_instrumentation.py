"""What the server's file says of clients: whether they record what libraries say of themselves, and ask AIR's rules."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry import trace

import agentlightning as agl
from agent_lightning import Client
from agent_lightning.runtime import air
from agentlightning.store import LightningStoreServer, SqliteLightningStore

DONE = {"state": "done", "reward": 1.0, "rollouts": 1, "failed": 0, "model": "none"}


class Server:
    """What the small server answers a client that evaluates, with a real store behind it and one rollout in that."""

    def __init__(self, store: SqliteLightningStore, address: dict[str, Any]) -> None:
        self._store = store
        self._address = address

    async def answer(self, request: web.Request) -> web.Response:
        if request.path == "/evaluate":
            return web.json_response(self._address)
        if request.path == "/status":
            await self._store.wait_for_rollouts(rollout_ids=[r.rollout_id for r in await self._store.query_rollouts()])
            return web.json_response(DONE)
        return web.json_response({})


@pytest.mark.parametrize("on", [True, False])
async def test_spans_of_libraries_are_recorded_if_it_is_on(tmp_path: Path, on: bool) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    served = LightningStoreServer(store, port=0, admin_key="k" * 32)
    await served.start()
    await store.add_resources({"llm": agl.LLM(endpoint="http://127.0.0.1:9/v1", model="m")})
    rollout = await store.enqueue_rollout({"question": "?"})
    address = {"store": served.endpoint, "key": "k" * 32, "nworkers": 1, "auto_instrumentation": on, "air_enabled": on}
    app = web.Application()
    app.router.add_post("/{path}", Server(store, address).answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()

    def agent(resource: Any, task: Any) -> float:
        with trace.get_tracer("a.library").start_as_current_span("of a library"):
            agl.emit_message(task.question)
        return 1.0

    rules = []
    air.on_span(lambda span: span.name == "agentlightning.message")(lambda span: rules.append(span) or 0.5)

    (tmp_path / "tasks.jsonl").write_text(json.dumps({"question": "?"}))
    client = Client(f"http://127.0.0.1:{runner.addresses[0][1]}")
    done = await asyncio.to_thread(client.evaluate, tmp_path / "tasks.jsonl", agent)
    assert done.reward == 1.0
    names = {span.name for span in await store.query_spans(rollout.rollout_id)}
    assert "agentlightning.message" in names, "what the agent says itself is recorded either way"
    assert ("of a library" in names) == on
    assert bool(rules) == on
    assert (
        "agentlightning.reward.rule"
        in {key for s in await store.query_spans(rollout.rollout_id) for key in s.attributes}
    ) == on
    assert air.enabled, "as it was before"
    air.clear()
    await runner.cleanup()
    await served.stop()
    await store.close()
