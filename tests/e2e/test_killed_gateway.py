"""kill -9 of a gateway that has just given an agent its last answer, and has not stored it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.runner.remote import Address, serve_rollouts
from agentlightning.store import LightningStoreClient
from tests.runner.test_lost_calls import KEY, Pausing, agent_of, check_whole

SITE = """
import asyncio, json, sys
from pathlib import Path
from agentlightning.gateway import Gateway, load_rendering
from agentlightning.keys import derived_secret
from agentlightning.models import resolve_model
from agentlightning.store import LightningStoreServer, SqliteLightningStore
from tests.gateway.scripted import ScriptedEngine
from tests.runner.test_lost_calls import KEY, Held

async def main(folder, ports, holds, journal):
    store, secret = SqliteLightningStore(Path(folder) / "store.db"), derived_secret(KEY)
    rendering = load_rendering(resolve_model("calc"))
    engine = ScriptedEngine(rendering, lambda *_: "It is 5.")
    gateway = Gateway(
        Held(store) if holds else store, engine, rendering, port=ports[0], secret=secret,
        journal=Path(folder) / "journal" if journal else None,
    )
    await gateway.start()
    await store.add_resources({"llm": gateway.as_resource()})
    await LightningStoreServer(store, port=ports[1], admin_key=KEY, secret=secret).start()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(**json.loads(sys.argv[1])))
"""


def site(**spec: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SITE, json.dumps(spec)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], env=environment, text=True, stdout=-1)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=30)


def free_ports() -> list[int]:
    with socket.socket() as one, socket.socket() as two:
        for listening in (one, two):
            listening.bind(("127.0.0.1", 0))
        return [one.getsockname()[1], two.getsockname()[1]]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("journal", [False, True])
async def test_the_attempt_is_done_again(tmp_path: Path, journal: bool) -> None:
    spec: dict[str, Any] = {"folder": str(tmp_path), "ports": free_ports(), "journal": journal}
    url = f"http://127.0.0.1:{spec['ports'][1]}"
    first = await asyncio.to_thread(site, holds=True, **spec)
    client, stop, pausing = LightningStoreClient(url, key=KEY), asyncio.Event(), Pausing(calls=2)
    rollout = await client.enqueue_rollout(0, config=agl.RolloutConfig(max_attempts=1))
    running = asyncio.create_task(serve_rollouts(agent_of(pausing), Address(url, KEY), stop=stop))
    try:
        await pausing.until_asked(2)
        kill(first)
        second = await asyncio.to_thread(site, holds=False, **spec)
        pausing.end()
        (ended,) = await client.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=60.0)
        await check_whole(client, ended, 2, ["infra_error", "ok"])
        kill(second)
    finally:
        stop.set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()
