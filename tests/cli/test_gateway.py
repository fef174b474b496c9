"""`agl gateway` in front of another gateway, which plays the provider: real processes, a real client."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AuthenticationError, OpenAI

from agentlightning.store import SqliteLightningStore
from tests.adapter.test_atif import check as check_atif
from tests.cli.test_looking import agl
from tests.typed import typed

CALC = [sys.executable, "-m", "agentlightning", "gateway", "--port", "0"]


@contextmanager
def running(folder: Path, *arguments: str, **environment: str) -> Iterator[str]:
    """A gateway process; gives its URL."""
    command = [*CALC, *arguments]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as process:
        assert process.stdout is not None
        try:
            yield next(m for line in process.stdout if (m := re.search(r"at (http://\S+/v1)", line)))[1]
        finally:
            process.send_signal(signal.SIGTERM)
        assert "Stopped." in process.stdout.read()
        assert process.wait(timeout=30) == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_model_behind_a_gateway_behind_a_gateway(tmp_path: Path) -> None:
    with (
        running(tmp_path, "--model", "calc", "--path", "far.db", "--api-key", "far-key") as far,
        running(
            tmp_path, "--upstream", f"policy={far}", "--path", "near.db", "--no-key", AGL_UPSTREAM_KEY="far-key"
        ) as near,
        OpenAI(base_url=near, api_key="anything", max_retries=0) as client,
        OpenAI(base_url=far, api_key="wrong", max_retries=0) as stranger,
    ):
        answer = client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "What is 1 + 2?"}], max_tokens=20
        )
        assert answer.choices[0].finish_reason in ("stop", "length")
        with pytest.raises(AuthenticationError):
            stranger.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hello"}])
    calls = {}
    for name in ("far.db", "near.db"):
        store = SqliteLightningStore(tmp_path / name)
        (rollout,) = await store.query_rollouts()
        calls[name] = list((await store.query_calls([rollout.rollout_id]))[rollout.rollout_id])
        spans = await store.query_spans(rollout.rollout_id)
        assert answer.id in {span.attributes.get("gen_ai.response.id") for span in spans}
        await store.close()
    assert len(calls["far.db"]) == 1
    assert calls["near.db"] == [], "the provider's tokens are its own"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_sessions_as_trajectories(tmp_path: Path) -> None:
    """Each is written when it ends, and can be exported later: no reward is asked of what nobody rewarded."""
    with (
        running(tmp_path, "--model", "calc", "--atif", "seen") as url,
        OpenAI(base_url=url, api_key="any", max_retries=0) as client,
    ):
        for session in ("a", "a", "b"):
            client.chat.completions.create(
                model="calc",
                messages=[{"role": "user", "content": "1+2="}],
                max_tokens=5,
                extra_headers={"x-session-id": session},
                extra_body={"min_tokens": 5},  # an empty answer teaches nothing
            )
        assert list((tmp_path / "seen").iterdir()) == []
    written = [json.loads(file.read_text()) for file in (tmp_path / "seen").iterdir()]
    for trajectory in written:
        check_atif(trajectory)
    agl("export", tmp_path / "gateway.db", "--atif", tmp_path / "later")
    for trajectory in written:
        assert json.loads((tmp_path / "later" / f"{trajectory['session_id']}.json").read_text()) == trajectory
    agents = [[s for t in all_of(one) for s in t["steps"] if s["source"] == "agent"] for one in written]
    assert sorted(map(len, agents)) == [1, 2]
    assert all(len(step["metrics"]["completion_token_ids"]) > 0 for steps in agents for step in steps)
    agl("export", tmp_path / "gateway.db", "--jsonl", tmp_path / "said.jsonl")
    assert len((tmp_path / "said.jsonl").read_text().splitlines()) == 3


def all_of(trajectory: dict[str, Any]) -> list[dict[str, Any]]:
    return [trajectory, *trajectory.get("subagent_trajectories", ())]


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    ["none", *(pytest.param(how, marks=pytest.mark.slow) for how in ("--no-key", "no upstream key"))],
)
def test_a_gateway_that_can_spend_has_a_key_unless_it_is_opened(tmp_path: Path, given: str) -> None:
    arguments = ["--upstream", "m=http://127.0.0.1:9/v1", *(["--no-key"] if given == "--no-key" else [])]
    environment = {**os.environ, **({} if given == "no upstream key" else {"AGL_UPSTREAM_KEY": "paid"})}
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    with subprocess.Popen(
        [*CALC, *arguments], cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        printed = process.stdout.readline() + process.stdout.readline()
        url = re.search(r"at (http://\S+/v1)", printed)
        key = re.search(r"send the key (\S+) ", process.stdout.readline()) if given == "none" else None
        assert url is not None
        refused = httpx.post(f"{url[1]}/chat/completions", json=body, timeout=30)
        if given == "none":
            assert refused.status_code == 401
            assert key is not None
            known = {"authorization": f"Bearer {key[1]}"}
            passed = httpx.post(f"{url[1]}/chat/completions", json=body, headers=known, timeout=30)
            assert passed.status_code == 502, "the provider is not there"
        else:
            assert refused.status_code == 502, "it went on to the provider"
        process.send_signal(signal.SIGTERM)
        process.stdout.read()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Say what to serve"),
        (["--upstream", "gpt"], "NAME=URL"),
        (["--model", "calc", "--no-key", "--api-key", "k"], "only those who have the key"),
        (["--model", "calc", "--host", "0.0.0.0"], "give --api-key"),
        (["--model", "calc", "--atif", "/dev/null/folder"], "--atif /dev/null/folder: Not a directory"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = typed(tmp_path, *CALC[1:], *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
