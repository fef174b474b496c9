"""Store, gateway and runner as commands, with attempts as Jobs of a real cluster (`scripts/kubernetes_node.py`)."""

from __future__ import annotations

import asyncio
import shlex
import time
from pathlib import Path

import aiohttp
import pytest

import agentlightning as agl
from agentlightning.types.reward import find_final_reward
from tests.e2e.test_kubernetes import KEY, command, provider
from tests.litagent.cluster.admin import Admin
from tests.litagent.test_isolation import ASK
from tests.litagent.test_kubernetes_node import NODE, URL, needs_node

ATTEMPTS, AT_ONCE = 48, 16


@needs_node
@pytest.mark.kubernetes
@pytest.mark.timeout(600)
async def test_dozens_of_rollouts_are_jobs_that_ask_a_gateway(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        aiohttp.ClientSession() as http,
        provider() as upstream,
        command(
            tmp_path, "store", "--path", "store.db", "--port", "0", until=r"http://127.0.0.1:\d+(?=.*Ctrl-C)"
        ) as store,
        command(
            tmp_path,
            *("gateway", "--server", store, "--upstream", f"gpt={upstream}", "--port", "0"),
            *("--host", NODE, "--api-key", "for clients"),
            until=r"http://[\d.]+:\d+/v1",
        ) as gateway,
    ):
        admin, client = Admin(http, URL, "e2e"), agl.LightningStoreClient(store, key=KEY)
        await admin.prepare()
        await client.add_resources({"llm": agl.ProxyLLM(endpoint=gateway, model="gpt")})
        asked = await client.enqueue_many_rollouts([agl.EnqueueRolloutRequest(input=n) for n in range(ATTEMPTS)])
        options = [f"--isolation-option={option}" for option in ("image=agent:1", f"server={URL}", "namespace=e2e")]
        run = ("--agent", shlex.join(["python3", "-c", ASK]), "--isolation", "kubernetes", *options)
        began = time.monotonic()
        async with command(
            tmp_path, "runner", "--server", store, *run, "--concurrency", str(AT_ONCE), until="Running rollouts"
        ):
            ended = await client.wait_for_rollouts(rollout_ids=[r.rollout_id for r in asked], timeout=500.0)
        took = time.monotonic() - began
        with capsys.disabled():
            print(f"\n{ATTEMPTS} Jobs, {AT_ONCE} at once: {took:.0f} s, {ATTEMPTS / took:.2f} a second")  # noqa: T201
        assert [r.status for r in ended] == [agl.RolloutStatus.SUCCEEDED] * ATTEMPTS
        for rollout in ended:
            assert len(await client.query_attempts(rollout.rollout_id)) == 1
            spans = (await client.query_spans(rollout.rollout_id)).items
            assert find_final_reward(spans) == 7.0
            assert any("gpt" in str(span.attributes) for span in spans), "the gateway recorded the call"
        await client.close()
        async with asyncio.timeout(60):
            while await admin.all("jobs") or await admin.all("pods") or await admin.all("secrets"):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
