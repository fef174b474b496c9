"""`agl train --remote` with `agl runner` in another process, and a judge of another provider from the command line."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from socket import socket
from typing import Any

import pytest
from aiohttp import web

from agentlightning.metrics import read_metrics
from agentlightning.store import LightningStoreServer, SqliteLightningStore
from agentlightning.trainer.spending import spent_before
from agentlightning.types.call import Spent

AGENT = """
import agentlightning as agl
from openai import AsyncOpenAI

@agl.rollout
async def agent(task, llm):
    client = AsyncOpenAI(base_url=llm.endpoint, api_key="dummy")
    messages = [{"role": "user", "content": task["question"]}]
    said = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=8)
    text = said.choices[0].message.content or ""
    judge = llm.for_model("judge")
    client = AsyncOpenAI(base_url=judge.endpoint, api_key="dummy")
    verdict = await client.chat.completions.create(model=judge.model, messages=[{"role": "user", "content": text}])
    assert verdict.choices[0].message.content == "fine"
    return float(len(text) % 2)
"""


async def judge(request: web.Request) -> web.Response:
    assert request.headers["Authorization"] == "Bearer judge-key"
    message = {"role": "assistant", "content": "fine"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    body = {"id": os.urandom(8).hex(), "object": "chat.completion", "created": 1, "model": "judge"}
    return web.json_response({**body, "choices": [choice], "usage": usage})


def free_port() -> int:
    with closing(socket()) as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[Any]:
    command = [sys.executable, "-m", "agentlightning", *arguments]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env={**os.environ, **environment}, **both)


async def reached(port: int, process: subprocess.Popen[Any]) -> None:
    """Wait until somebody listens there."""
    while process.poll() is None:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.2)
        else:
            writer.close()
            await writer.wait_closed()
            return
    raise AssertionError(process.communicate()[0])


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_trainer_without_an_agent_and_a_runner_with_it(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"question": "What is 1 + 2?"}\n{"question": "What is 3 + 2?"}\n')
    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge)
    site = web.AppRunner(app)
    await site.setup()
    await web.TCPSite(site, "127.0.0.1", their_port := free_port()).start()
    port = free_port()
    ours = {"AGL_STORE_KEY": "store-key", "AGL_SERVER_PORT": str(port), "AGL_UPSTREAM_KEY": "judge-key"}
    settings = [f"--set={s}" for s in ("steps=1", "group_size=2", "tasks_per_step=2", "flat_steps=0")]
    judged = ["--upstream", f"judge=http://127.0.0.1:{their_port}/v1", "--upstream-price", "judge=1000,2000"]
    judged += ["--upstream-limit", "judge.run_calls=100"]
    files = ["--tasks", "tasks.jsonl", "--run-dir", "run"]
    trainer = start(tmp_path, "train", "--remote", "--model", "calc", *files, *judged, *settings, **ours)
    runner = None
    try:
        await reached(port, trainer)
        here = ["--server", f"http://127.0.0.1:{port}", "--agent", "agent.py:agent", "--give-up-after", "1"]
        runner = start(tmp_path, "runner", *here, AGL_STORE_KEY="store-key")
        said, _ = await asyncio.to_thread(trainer.communicate)
    finally:
        for process in (trainer, runner):
            if process is not None and process.poll() is None:
                process.terminate()
        await site.cleanup()
    assert runner is not None
    heard = runner.communicate()[0]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1], said + heard
    assert "Cancel" not in said, "no server complains at the end"
    assert "Traceback" not in said + heard
    spent = {"provider/judge/calls": 4, "provider/judge/tokens": 8, "provider/judge/cost": pytest.approx(0.012)}
    assert {name: value for name, value in rows[-1].items() if name.startswith("provider/")} == spent
    assert "Calls to judge: 4 calls, 8 tokens, cost 0.0120." in said
    assert spent_before(tmp_path / "run" / "metrics.jsonl") == {"judge": Spent(calls=4, tokens=8, cost=0.012)}
    shown = start(tmp_path, "show", "run", "--limit", "1").communicate()[0]
    assert "calls to judge: 1 call, 2 tokens, cost 0.0030" in shown
    await check_calls(tmp_path / "run" / "store.db")


async def check_calls(path: Path) -> None:
    """Every rollout asked the judge, whose answer is in the trace and is no call of the policy."""
    store = SqliteLightningStore(path)
    rollouts = list(await store.query_rollouts())
    assert len(rollouts) == 4
    for rollout in rollouts:
        models = [span.attributes.get("gen_ai.request.model") for span in await store.query_spans(rollout.rollout_id)]
        assert models.count("judge") == 1
        calls = (await store.query_calls([rollout.rollout_id]))[rollout.rollout_id]
        assert len(calls) == 1
    await store.close()


PLAIN = """
import agentlightning as agl
from openai import AsyncOpenAI

@agl.rollout
async def agent(task, llm):
    client = AsyncOpenAI(base_url=llm.endpoint, api_key="dummy")
    messages = [{"role": "user", "content": task["question"]}]
    said = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=8)
    return float(len(said.choices[0].message.content or "") % 2)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("runners", [0, 1, 2], ids=["the agent here", "one runner", "two runners"])
async def test_a_store_that_somebody_else_serves(tmp_path: Path, runners: int) -> None:
    (tmp_path / "agent.py").write_text(PLAIN)
    (tmp_path / "key").write_text("store-key\n")
    (tmp_path / "tasks.jsonl").write_text('{"question": "What is 1 + 2?"}\n{"question": "What is 3 + 2?"}\n')
    store = SqliteLightningStore(tmp_path / "elsewhere.db")
    server = LightningStoreServer(store, port=0, admin_key="store-key")
    await server.start()
    settings = [f"--set={s}" for s in ("steps=1", "group_size=2", "tasks_per_step=2", "flat_steps=0")]
    place = ["--server", server.endpoint]
    here = ["--agent", "agent.py:agent"]
    files = ["--tasks", "tasks.jsonl", "--run-dir", "run", "--key-file", "key", *place, *(here if not runners else [])]
    trainer = start(tmp_path, "train", "--model", "calc", *files, *settings)
    joined = [start(tmp_path, "runner", *place, *here, AGL_STORE_KEY="store-key") for _ in range(runners)]
    try:
        said, _ = await asyncio.to_thread(trainer.communicate)
        rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
        assert [row["step"] for row in rows] == [1], said
        assert len(list(await store.query_rollouts())) == 4
        assert not (tmp_path / "run" / "store.db").exists()
        assert "Traceback" not in said
    finally:
        for process in joined if trainer.poll() is not None else (trainer, *joined):
            process.kill()
            process.communicate()
        await server.stop()
        await store.close()


@pytest.mark.slow
def test_a_key_that_is_nowhere_is_said(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"question": "What is 1 + 2?"}\n')
    given = ["--tasks", "tasks.jsonl", "--model", "calc", "--server", "http://127.0.0.1:9", "--key-file", "nowhere"]
    said, _ = start(tmp_path, "train", *given).communicate(timeout=60)
    assert "cannot be read from nowhere" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_nobody_to_run_the_agent_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"question": "What is 1 + 2?"}\n')
    process = start(tmp_path, "train", "--tasks", "tasks.jsonl", "--model", "calc")
    said, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "--remote" in said
    assert "Traceback" not in said
