"""An empty key, as a variable that is not set gives, keeps nobody out: every place that takes a key refuses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_lightning import Client
from agent_lightning.server import serve
from agent_lightning.settings import Settings
from agentlightning.errors import ConfigError
from agentlightning.gateway import Gateway
from agentlightning.gateway.serving.anonymous import AnonymousAccess
from agentlightning.keys import CALLS, derived_secret, sign_attempt_key, sign_url_key, verify_attempt_key
from agentlightning.runner.remote import Address
from agentlightning.store import InMemoryLightningStore, LightningStoreClient, LightningStoreServer
from agentlightning.trainer.sync import run_sync
from tests.typed import agl

NONE: Any = None
PLACES: dict[str, Callable[[str], Any]] = {
    "store": lambda key: LightningStoreServer(InMemoryLightningStore(), "0.0.0.0", 0, admin_key=key),
    "store on loopback": lambda key: LightningStoreServer(InMemoryLightningStore(), port=0, admin_key=key),
    "store's client": lambda key: LightningStoreClient("http://127.0.0.1:9", key=key),
    "runner": lambda key: Address("http://127.0.0.1:9", key),
    "front of a model": lambda key: AnonymousAccess(NONE, NONE, key),
    "small server": lambda key: run_sync(serve(Settings(), "127.0.0.1", 0, key)),
    "small client": lambda key: Client("http://127.0.0.1:9", key),
}
COMMANDS = {
    "store": ["store", "--path", "store.db", "--host", "0.0.0.0", "--key", ""],
    "serve": ["serve", "calc", "--host", "0.0.0.0", "--api-key", ""],
    "gateway's providers": ["gateway", "--upstream", "m=http://127.0.0.1:9", "--upstream-key", ""],
    "runner": ["runner", "--agent", "echo 1", "--server", "http://127.0.0.1:9", "--key", ""],
}


@pytest.mark.parametrize("key", ["", " ", "\n"])
@pytest.mark.parametrize("place", list(PLACES))
def test_an_empty_key_is_not_a_key(place: str, key: str) -> None:
    with pytest.raises(ConfigError, match="is not a key"):
        PLACES[place](key)


SECRETS: dict[str, Callable[[bytes], Any]] = {
    "gateway": lambda secret: Gateway(InMemoryLightningStore(), NONE, NONE, secret=secret),
    "store": lambda secret: LightningStoreServer(InMemoryLightningStore(), port=0, admin_key="k", secret=secret),
    "runner": lambda secret: Address("http://127.0.0.1:9", "k", secret),
    "signing a key": lambda secret: sign_attempt_key(secret, "ro", "at"),
    "signing a URL": lambda secret: sign_url_key(secret, "ro", "at", (CALLS,)),
    "checking a key": lambda secret: verify_attempt_key(secret, sign_attempt_key(b"x", "ro", "at")),
    "deriving it": lambda secret: derived_secret(secret.decode()),
}


@pytest.mark.parametrize("secret", [b"", b"\n"])
@pytest.mark.parametrize("place", list(SECRETS))
def test_an_empty_secret_is_none(place: str, secret: bytes) -> None:
    with pytest.raises(ConfigError, match="is not a key"):
        SECRETS[place](secret)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_commands_refuse_an_empty_key(name: str, tmp_path: Path) -> None:
    done = agl(tmp_path, *COMMANDS[name])
    assert done.returncode == 1, done.stdout
    assert "is a variable not set?" in " ".join((done.stdout + done.stderr).split())
