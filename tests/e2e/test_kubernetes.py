"""`agl store`, `agl gateway` and `agl runner --isolation kubernetes` as commands, with attempts as Jobs of a cluster.

One key opens all three, as in the chart. The cluster is that of `tests/litagent/cluster`; a provider plays the model.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

import agentlightning as agl
from agentlightning.types.reward import find_final_reward
from tests.litagent.cluster.api_server import ApiServer
from tests.litagent.cluster.kubelet import Kubelet
from tests.litagent.test_isolation import ASK

KEY = "the store's key"


@asynccontextmanager
async def command(folder: Path, *arguments: str, until: str) -> AsyncIterator[str]:
    """`agl ARGUMENTS` while it serves; gives what `until` finds in its output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentlightning", *arguments),
        cwd=folder,
        env={**os.environ, "AGL_STORE_KEY": KEY, "COLUMNS": "300"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    said, found = "", None
    try:
        while found is None:
            line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
            assert line, said
            said += line
            found = re.search(until, line)
        yield found[0]
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = await asyncio.wait_for(process.communicate(), 60)
        assert "Traceback" not in said + rest.decode(), said + rest.decode()


@asynccontextmanager
async def provider() -> AsyncIterator[str]:
    """A model elsewhere that always answers 7."""

    async def answer(_: web.Request) -> web.Response:
        message = {"role": "assistant", "content": "7"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        made = {"id": "c-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return web.json_response({**made, "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[tuple[str, ApiServer]]:
    server = ApiServer()
    url = await server.start()
    kubelet = Kubelet(url, folder)
    server.log_of = lambda pod: bytes(kubelet.logs[pod])
    running = asyncio.create_task(kubelet.run())
    yield url, server
    assert not running.done(), running.result()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop()


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_rollouts_of_a_store_are_jobs_that_ask_a_gateway(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(ASK)
    async with (
        cluster(tmp_path / "pods") as (api, server),
        provider() as upstream,
        command(
            tmp_path, "store", "--path", "store.db", "--port", "0", until=r"http://127.0.0.1:\d+(?=.*Ctrl-C)"
        ) as store,
        command(
            tmp_path,
            *("gateway", "--server", store, "--upstream", f"gpt={upstream}", "--port", "0"),
            until=r"http://127.0.0.1:\d+/v1",
        ) as gateway,
    ):
        client = agl.LightningStoreClient(store, key=KEY)
        await client.add_resources({"llm": agl.ProxyLLM(endpoint=gateway, model="gpt")})
        asked = await client.enqueue_many_rollouts([agl.EnqueueRolloutRequest(input=n) for n in range(3)])
        options = ("--isolation-option", "image=agent:1", "--isolation-option", f"server={api}")
        run = ("--agent", f"{sys.executable} -S {agent}", "--isolation", "kubernetes", *options)
        async with command(tmp_path, "runner", "--server", store, *run, until="Running rollouts"):
            ended = await client.wait_for_rollouts(rollout_ids=[r.rollout_id for r in asked], timeout=90.0)
        assert [r.status for r in ended] == [agl.RolloutStatus.SUCCEEDED] * 3
        for rollout in ended:
            spans = (await client.query_spans(rollout.rollout_id)).items
            assert find_final_reward(spans) == 7.0
            assert any("gpt" in str(span.attributes) for span in spans), "the gateway recorded the call"
        await client.close()
        assert server.asked["POST jobs"] == 3
        async with asyncio.timeout(10):
            while server.of("jobs") or server.of("secrets"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
