"""The key of a store that somebody else serves: from the command, a file, the environment, or kept by its server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest

from agentlightning.cli.train import store_key, with_store
from agentlightning.errors import ConfigError
from agentlightning.net.local_keys import kept_key
from agentlightning.store import LightningStoreServer, SqliteLightningStore
from tests.net.test_local_keys import started
from tests.typed import typed

HERE = "http://127.0.0.1:4747"
AWAY = "http://10.0.0.1:4747"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No keys but those of the test."""
    monkeypatch.delenv("AGL_STORE_KEY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_a_training_looks_in_the_file_then_the_environment_then_where_servers_keep_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key.txt"
    file.write_text("of the file\n")
    assert store_key(HERE, None) is None
    with kept_key(4747, "kept"):
        assert store_key(HERE, None) == "kept"
        assert store_key(AWAY, None) is None, "a key of this machine goes to no other"
        assert store_key(None, None) is None
        monkeypatch.setenv("AGL_STORE_KEY", "")
        assert store_key(HERE, None) == "kept", "an empty variable names none"
        monkeypatch.setenv("AGL_STORE_KEY", "of the environment")
        assert store_key(HERE, None) == store_key(AWAY, None) == "of the environment"
        assert store_key(HERE, file) == store_key(AWAY, file) == "of the file"


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe"])
def test_a_file_without_a_key_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    monkeypatch.setenv("AGL_STORE_KEY", "of the environment")
    if content is not None:
        (tmp_path / "key.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"key\.txt"):
        store_key(HERE, tmp_path / "key.txt")


@pytest.mark.parametrize("strategy", ["processes", "ray"])
def test_runners_that_are_started_here_have_their_own_store(strategy: str) -> None:
    with pytest.raises(ConfigError, match="--server"):
        with_store(HERE, strategy, None)


KEY = "the store's own key"


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[SqliteLightningStore, str]]:
    """A store, and where it is served to who has its key."""
    store = SqliteLightningStore(tmp_path / "recorded.db")
    server = LightningStoreServer(store, port=0, admin_key=KEY)
    await server.start()
    yield store, server.endpoint
    await server.stop()
    await store.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["kept", *(pytest.param(way, marks=pytest.mark.slow) for way in ("file", "environment"))]
)
async def test_a_gateway_records_in_the_store_whose_key_it_finds(
    served: tuple[SqliteLightningStore, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    store, address = served
    (tmp_path / "key.txt").write_text(f"{KEY}\n")
    options = ["--no-key", "--server", address, *(["--key", f"@{tmp_path / 'key.txt'}"] if way == "file" else [])]
    if way != "kept":
        monkeypatch.setenv("AGL_STORE_KEY", KEY if way == "environment" else "another")
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    stack = ExitStack()
    try:
        stack.enter_context(kept_key(int(address.rpartition(":")[2]), KEY if way == "kept" else "not this one"))
        url, _ = await asyncio.to_thread(stack.enter_context, started("gateway", tmp_path, *options))
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as answer:
            assert answer.status >= 400, "nobody listens behind it"
        assert (await store.query_rollouts()).total == 1
    finally:
        await asyncio.to_thread(stack.close)


@pytest.mark.parametrize("key", [None, "another"])
async def test_a_gateway_does_not_start_without_the_stores_key(
    served: tuple[SqliteLightningStore, str], tmp_path: Path, key: str | None
) -> None:
    _, address = served
    command = ["-m", "agentlightning", "gateway", "--upstream", "m=http://127.0.0.1:9/v1", "--port", "0"]
    environment = {"AGL_STORE_KEY": key} if key else {}
    done = await asyncio.to_thread(typed, tmp_path, *command, "--server", address, environment=environment)
    assert done.returncode != 0
    assert "key" in done.stderr
    assert "Traceback" not in done.stderr
