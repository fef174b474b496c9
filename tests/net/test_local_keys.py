"""On loopback without a key, a server that can write or spend makes one: nobody else on the machine may use it, and the
owner's own clients find it by themselves.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from agent_lightning import Client
from agent_lightning.exceptions import DataUploadError
from agentlightning.algorithm.prompts.journal import Journal
from agentlightning.errors import StoreError
from agentlightning.files import atomic_write
from agentlightning.keys import new_key, redacted, sign_attempt_key, verify_attempt_key
from agentlightning.net.local_keys import find_key, kept_key, made_key
from agentlightning.runner.remote import Address
from agentlightning.store import LightningStoreClient, SqliteLightningStore
from agentlightning.trainer.log import logged

COMMANDS = {
    "store": ["-m", "agentlightning", "store", "--path", "store.db", "--port", "0"],
    "dashboard": ["-m", "agentlightning", "dashboard", "store.db", "--no-open"],
    "gateway": ["-m", "agentlightning", "gateway", "--upstream", "m=http://127.0.0.1:9/v1", "--port", "0"],
    "small": ["-m", "agent_lightning.server", "--model", "calc", "--port", "0"],
}
WRITES = {
    "store": ("/v1/agl/statistics", None),
    "dashboard": ("/v1/agl/statistics", None),
    "gateway": ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
    "small": ("/status", {}),
}
OPENS = ["store", "gateway", "small"]


@contextmanager
def started(kind: str, folder: Path, *more: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server in a process of its own, with a home in `folder`, and its URL."""
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "AGL_UPSTREAM_KEY": "paid"}
    command = [sys.executable, "-u", *COMMANDS[kind], *more]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = next(m for line in process.stdout if (m := re.search(r"http://127\.0\.0\.1:\d+", line)))[0]
            yield url, process
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


async def asked(kind: str, url: str, key: str | None = None) -> int:
    """The status of a request that reads all, writes or spends."""
    path, body = WRITES[kind]
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        sent = session.get(url + path) if body is None else session.post(url + path, json=body)
        async with sent as answer:
            return answer.status


async def until_kept(folder: Path, url: str) -> str:
    file = folder / "state" / "agentlightning" / "keys" / url.rpartition(":")[2]
    async with asyncio.timeout(30):
        while not file.is_file():  # noqa: ASYNC110 – another process writes it
            await asyncio.sleep(0.02)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    return file.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMMANDS)
async def test_a_server_that_is_given_no_key_makes_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await SqliteLightningStore(tmp_path / "store.db").close()
    with started(kind, tmp_path) as (url, _):
        key = await until_kept(tmp_path, url)
        assert await asked(kind, url) == 401
        assert await asked(kind, url, "agl-wrong") == 401
        assert await asked(kind, url, key) not in (401, 403)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        assert find_key(url) == key == find_key(url.replace("127.0.0.1", "localhost"))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of somebody else"))
        assert find_key(url) is None
        assert redacted(f"I was given {key}.") == f"I was given {key[:7]}….", "as an attempt's key"
    assert not list((tmp_path / "state" / "agentlightning" / "keys").iterdir()), "a key goes with its server"


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPENS)
async def test_it_can_be_opened_to_all(kind: str, tmp_path: Path) -> None:
    with started(kind, tmp_path, "--no-key") as (url, _):
        assert await asked(kind, url) not in (401, 403)
        assert not (tmp_path / "state").exists()


@pytest.mark.slow
async def test_the_pages_of_a_dashboard_stay_open_to_be_read(tmp_path: Path) -> None:
    await SqliteLightningStore(tmp_path / "store.db").close()
    with started("dashboard", tmp_path) as (url, _):
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/dashboard/api/runs") as answer:
                assert answer.status == 200
            async with session.post(f"{url}/v1/agl/rollouts", json={"input": 1}) as answer:
                assert answer.status == 401


@pytest.mark.slow
async def test_clients_of_the_same_user_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started("store", tmp_path) as (url, _):
        key = await until_kept(tmp_path, url)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        client = LightningStoreClient(url)
        rollout = await client.start_rollout(input={"x": 1})
        assert (await client.get_rollout_by_id(rollout.rollout_id)) is not None
        assert Address(url, None).signing_secret == Address(url, key).signing_secret, "runners sign with it"
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of somebody else"))
        with pytest.raises(StoreError, match="Send the store's key"):
            await client.statistics()
        await client.close()


@pytest.mark.slow
async def test_clients_of_the_small_server_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started("small", tmp_path) as (url, _):
        await until_kept(tmp_path, url)
        (tmp_path / "tasks.jsonl").write_text(json.dumps({"question": "?"}))
        with pytest.raises(DataUploadError, match="401"):
            await asyncio.to_thread(Client(url).upload_data, tmp_path / "tasks.jsonl")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        assert await asyncio.to_thread(Client(url).upload_data, tmp_path / "tasks.jsonl") == 1


def test_a_made_key_is_no_attempts_key() -> None:
    keys = {new_key() for _ in range(200)}
    assert len(keys) == 200
    assert all(redacted(f'{{"said": "{key}"}}') == f'{{"said": "{key[:7]}…"}}' for key in keys)
    assert all(verify_attempt_key(b"secret", key) is None for key in keys)


def test_where_a_key_is_made() -> None:
    assert made_key(None, "127.0.0.1")
    assert made_key(None, "localhost")
    assert made_key("given", "127.0.0.1") is None
    assert made_key(None, "127.0.0.1", open_to_all=True) is None
    assert made_key(None, "0.0.0.0") is None, "which is refused without a key"


def test_it_is_sent_to_no_other_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with kept_key(4747, "agl-key"):
        assert find_key("http://127.0.0.1:4747") == find_key("http://[::1]:4747/v1") == "agl-key"
        for url in ("http://10.0.0.1:4747", "http://evil.example:4747", "http://127.0.0.1.evil.example:4747", "x", ""):
            assert find_key(url) is None
        assert find_key("http://127.0.0.1:4748") is None
    assert find_key("http://127.0.0.1:4747") is None


def test_a_home_that_cannot_be_written_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with kept_key(4747, "agl-key"):
        assert find_key("http://127.0.0.1:4747") is None


KEYS = {"a server's": new_key(), "an attempt's": sign_attempt_key(b"secret", "ro-1", "at-1")}


@pytest.mark.parametrize("key", KEYS.values(), ids=list(KEYS))
def test_no_file_of_a_run_keeps_a_key(tmp_path: Path, key: str) -> None:
    said = f"My key is {key}, and \x1b[2J."
    journal = Journal(tmp_path / "journal.jsonl")
    journal.put("ask-1", {"text": said, "cost": 1})
    known = journal.get("ask-1")
    journal.close()
    atomic_write(tmp_path / "run.json", json.dumps({"error": said}))
    with logged(tmp_path / "log.txt"):
        logging.getLogger("agentlightning.test").error("The agent said %s", said)
    for file in tmp_path.iterdir():
        assert key not in file.read_text(), file
        assert key[:7] in file.read_text(), file
    assert "\x1b" not in (tmp_path / "log.txt").read_text()
    again = Journal(tmp_path / "journal.jsonl")
    assert again.get("ask-1") == known, "a run that goes on has what the first one had"
    again.close()
