"""Requests of ours stay where they are sent: no client follows a redirect, so keys stay home. None takes an answer
without end."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import agentlightning
from agent_lightning import Client
from agentlightning.algorithm.parts.teacher import KEY, EndpointTeacher
from agentlightning.algorithm.prompts.critic import CriticFailure, HttpCritic, Question, ask
from agentlightning.backend.vllm import api as vllm_api
from agentlightning.backend.vllm.api import VLLMApi
from agentlightning.cli.optimize import only_model
from agentlightning.environments.openenv import OpenEnvEnvironment
from agentlightning.errors import AgentLightningError
from agentlightning.gateway import Gateway, Provider
from agentlightning.litagent import Kubernetes
from agentlightning.litagent.kubernetes.api import ClusterApi
from agentlightning.net import outgoing
from agentlightning.net.outgoing import http_session, reason_of
from agentlightning.net.server import LoopServer
from agentlightning.runner.remote import Address, RemoteGateway
from agentlightning.store import InMemoryLightningStore, LightningStoreClient
from agentlightning.types import ProxyLLM
from tests.algorithm.test_teacher import conversation

ASK: Any = {"model": "gpt", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
BODY = b'{"of": "the other host"}'


class Recording:
    """An ASGI application that answers all requests alike and keeps what came."""

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes = BODY) -> None:
        self.status, self.headers, self.body = status, headers, body
        self.seen: list[dict[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    server = LoopServer(app, "127.0.0.1", 0, what="other", error=AgentLightningError)
    await server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.stop()


async def of_a_provider(url: str) -> str:
    said = ""
    async with AsyncExitStack() as stack:
        store = InMemoryLightningStore()
        stack.push_async_callback(store.close)
        models = {"gpt": Provider(base_url=f"{url}/v1", api_key="secret", headers={"x-custom": "secret"})}
        async with Gateway(store, None, None, models=models) as gateway, aiohttp.ClientSession() as session:
            for path in ("chat/completions", "messages", "responses", "completions", "embeddings"):
                for stream in (False, True):
                    claimed = await store.start_rollout(input={})
                    ids = claimed.rollout_id, claimed.attempt.attempt_id
                    headers = {"authorization": f"Bearer {gateway.key_for(*ids)}"}
                    body = {**ASK, "input": "hi", "prompt": "hi", "stream": stream}
                    async with session.post(f"{gateway.endpoint}/{path}", json=body, headers=headers) as answer:
                        said += await answer.text()
                        assert answer.status == 502, path
    return said


async def of_a_teacher(url: str) -> str:
    with pytest.raises(AgentLightningError) as said:
        await EndpointTeacher(f"{url}/v1", "teacher").logprobs(conversation())
    return str(said.value)


async def of_a_critic(url: str) -> str:
    critic = HttpCritic(f"{url}/v1", "secret")
    found = await ask(
        critic, Question(model="gpt", messages=[{"role": "user", "content": "?"}], temperature=1.0, max_tokens=10), 10.0
    )
    await critic.close()
    assert isinstance(found, CriticFailure)
    return str(found)


async def of_a_list_of_models(url: str) -> str:
    with pytest.raises(AgentLightningError) as said:
        await only_model(f"{url}/v1", "secret")
    return str(said.value)


async def of_openenv(url: str) -> str:
    with pytest.raises(AgentLightningError) as said:
        async with OpenEnvEnvironment(url, tasks=1).open(0):
            raise AssertionError("it began")
    return str(said.value)


async def of_a_store(url: str) -> str:
    store = LightningStoreClient(url, key="secret", retry_seconds=0.2)
    with pytest.raises(AgentLightningError) as said:
        await store.statistics()
    with pytest.raises(AgentLightningError):
        await store.enqueue_rollout("task")
    await store.close()
    return str(said.value)


async def of_a_gateway(url: str) -> str:
    gateway = RemoteGateway(Address(url, "secret"))
    gateway.bind(ProxyLLM(endpoint=f"{url}/v1", model="policy"), "ro", "at", ())
    with pytest.raises(AgentLightningError) as said:
        await gateway.open_attempt("ro", "at")
    await gateway.close()
    return str(said.value)


async def of_vllm(url: str) -> str:
    api = VLLMApi(url, "secret")
    with pytest.raises(AgentLightningError) as said:
        await api.adapters()
    with pytest.raises(AgentLightningError):
        await api.forget_contexts()
    assert not await api.is_healthy()
    await api.close()
    return str(said.value)


async def of_vllms_models(url: str) -> str:
    api = VLLMApi(url, "secret")
    with pytest.raises(AgentLightningError) as said:
        await api.adapters()
    await api.close()
    return str(said.value)


async def of_a_cluster(url: str) -> str:
    async with ClusterApi.opened(Kubernetes("image", server=url)) as api:
        with pytest.raises(AgentLightningError) as said:
            await api.ask("GET", "jobs")
    return str(said.value)


async def of_a_small_client(url: str) -> str:
    client = Client(url, api_key="secret")
    with pytest.raises(Exception, match="redirect") as said:
        await client._post("/status", {})  # pyright: ignore[reportPrivateUsage]
    return str(said.value)


CLIENTS: list[Callable[[str], Awaitable[str]]] = [
    of_a_provider,
    of_a_teacher,
    of_a_critic,
    of_a_list_of_models,
    of_openenv,
    of_a_store,
    of_a_gateway,
    of_vllm,
    of_a_cluster,
    of_a_small_client,
]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("ask_it", CLIENTS)
async def test_keys_stay_home(
    ask_it: Callable[[str], Awaitable[str]], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "secret")
    internal = Recording(200, [(b"content-type", b"application/json")])
    async with served(internal) as there:
        first = Recording(status, [(b"location", f"{there}/stolen".encode())])
        async with served(first) as here:
            said = await ask_it(here)
    assert first.seen
    assert not internal.seen
    assert "redirects are not followed" in said
    assert "the other host" not in said


WITHOUT_END = [of_a_teacher, of_a_critic, of_a_list_of_models, of_openenv, of_a_gateway, of_a_cluster]
ASK_AGAIN = [of_a_teacher, of_a_cluster]
"""Those that ask again, for a minute at most, where an answer is no JSON."""
LOOK_AT_STATUS = [of_a_list_of_models, of_openenv]
"""Those that read nothing of an error."""


class Endless(Recording):
    """One whose answers do not end."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        for _ in range(128):
            await send({"type": "http.response.body", "body": self.body, "more_body": True})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ask_it", "status"),
    [*((one, 200) for one in WITHOUT_END), *((one, 500) for one in WITHOUT_END if one not in LOOK_AT_STATUS)],
)
async def test_an_answer_without_end_is_not_kept(ask_it: Callable[[str], Awaitable[str]], status: int) -> None:
    async with served(Endless(status, [(b"content-type", b"application/json")], b" " * 2**20)) as here:
        assert "its answer has more than 67,108,864 bytes" in await ask_it(here)


class Dripping(Recording):
    """One whose answers come steadily, and would take seconds."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        for _ in range(20):
            await asyncio.sleep(0.05)
            await send({"type": "http.response.body", "body": b" ", "more_body": True})


@pytest.mark.parametrize("ask_it", [*WITHOUT_END, of_vllms_models])
async def test_an_answer_that_drips_is_not_waited_for(
    ask_it: Callable[[str], Awaitable[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "ANSWER_SECONDS", 0.3)
    async with served(Dripping(200, [(b"content-type", b"application/json")])) as here:
        assert "its answer did not end within 0.3 s" in await ask_it(here)


async def test_a_server_of_vllm_that_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Recording):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await asyncio.sleep(1.0)

    for name in ("CONTROL_SECONDS", "HEALTH_SECONDS"):
        monkeypatch.setattr(vllm_api, name, 0.2)
    async with served(Silent(200, [])) as here:
        assert "TimeoutError" in await of_vllm(here)


@pytest.mark.parametrize(
    "ask_it", [pytest.param(ask, marks=pytest.mark.slow if ask in ASK_AGAIN else ()) for ask in WITHOUT_END]
)
async def test_an_answer_that_is_nested_too_deeply_is_said(ask_it: Callable[[str], Awaitable[str]]) -> None:
    nested = Recording(200, [(b"content-type", b"application/json")], b"[" * 100_000)
    async with served(nested) as here:
        assert await ask_it(here)


@pytest.mark.slow
def test_every_client_is_made_in_one_place() -> None:
    root = Path(agentlightning.__file__).parent
    making = {"ClientSession", "urlopen", "build_opener", "AsyncClient", "HTTPConnection", "HTTPSConnection"}
    found = set()
    for file in [*root.rglob("*.py"), *(root.parent / "agent_lightning").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in making:
                    found.add(file.relative_to(root.parent).as_posix())
    assert found == {"agentlightning/net/outgoing.py"}


NOTHING = "nothing listens at 127.0.0.1:1"
"""A port that only root may open, and nobody does."""


@pytest.mark.parametrize("ask_it", [of_a_provider, of_a_critic, of_a_store])
async def test_where_nothing_listens_is_said_by_its_address(ask_it: Callable[[str], Awaitable[str]]) -> None:
    said = await ask_it("http://127.0.0.1:1")
    assert NOTHING in said
    assert "ssl" not in said
    assert "ClientConnectorError" not in said


async def test_why_a_request_was_not_answered() -> None:
    async with http_session() as session:
        with pytest.raises(aiohttp.ClientError) as refused:
            await session.get("http://127.0.0.1:1")
        with pytest.raises(aiohttp.ClientError) as unknown:
            await session.get("http://no-such-host.invalid")
    assert reason_of(refused.value) == NOTHING
    assert reason_of(unknown.value) == "there is no host no-such-host.invalid"
    assert reason_of(TimeoutError()) == "no answer came in time"
    assert reason_of(OSError()) == "OSError"
