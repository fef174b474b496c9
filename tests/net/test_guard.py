"""What web pages of others can do to our servers: nothing, whichever server, path, method and type of body."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agent_lightning.server import create_app
from agent_lightning.settings import Settings
from agent_lightning.trainings import Trainings
from agentlightning.compat.llm_proxy import LLMProxy
from agentlightning.dashboard import served_with_dashboard
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.finetuning.app import ServerSettings, TrainingServer
from agentlightning.finetuning.recipe import BaseModel
from agentlightning.gateway import Gateway, Provider
from agentlightning.gateway.serving.anonymous import AnonymousAccess
from agentlightning.net.guard import ALLOW_HOSTS, Guard
from agentlightning.net.server import LoopServer
from agentlightning.store import InMemoryLightningStore, LightningStoreServer

JSON = "application/json"
PATHS = {
    "store": ["/v1/agl/queues/rollouts/enqueue", "/v1/agl/rollouts", "/v1/agl/spans", "/v1/agl/calls", "/v1/traces"],
    "dashboard": [
        "/dashboard/api/login",
        "/dashboard/api/logout",
        "/v1/agl/rollouts/search",
        "/v1/agl/attempts/update",
    ],
    "gateway": [
        "/v1/chat/completions",
        "/v1/messages",
        "/rollout/r/attempt/a/v1/reward",
        "/rollout/r/attempt/a/v1/close",
    ],
    "anonymous": ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"],
    "proxy": ["/v1/chat/completions", "/rollout/r/attempt/a/v1/chat/completions"],
    "small": ["/data", "/train", "/stop", "/status", "/checkpoint"],
    "training": [
        "/v1/files",
        "/v1/uploads",
        "/v1/fine_tuning/jobs",
        "/v1/fine_tuning/alpha/graders/run",
        "/v1/responses",
    ],
}
"""Of each server, what writes or spends."""


@asynccontextmanager
async def served(kind: str, tmp_path: Path) -> AsyncIterator[str]:
    async with AsyncExitStack() as stack:
        store = InMemoryLightningStore()
        stack.push_async_callback(store.close)
        models = {"gpt": Provider(base_url="http://127.0.0.1:9", api_key="key")}
        if kind in ("store", "dashboard"):
            server = LightningStoreServer(store, port=0) if kind == "store" else served_with_dashboard(store, port=0)
            await server.start()
            stack.push_async_callback(server.stop)
            yield server.endpoint
            return
        if kind == "training":
            settings = ServerSettings(port=0)
            training = TrainingServer(tmp_path, {"calc": BaseModel("calc", "calc")}, settings)
            await training.start()
            stack.push_async_callback(training.stop)
            yield training.endpoint.removesuffix("/v1")
            return
        if kind == "proxy":
            listed: Any = [
                {"model_name": "gpt", "litellm_params": {"model": "openai/gpt", "api_base": "http://127.0.0.1:9"}}
            ]
            proxy = await stack.enter_async_context(LLMProxy(store=store, model_list=listed))
            yield f"http://127.0.0.1:{proxy.port}"
            return
        if kind == "small":
            app: Any = create_app(Trainings(Settings(), "127.0.0.1", tmp_path), None)
        else:
            gateway = await stack.enter_async_context(Gateway(store, None, None, models=models))
            if kind == "gateway":
                yield gateway.endpoint.removesuffix("/v1")
                return
            app = AnonymousAccess(gateway, store, None)
        front = LoopServer(app, "127.0.0.1", 0, what=kind, error=AgentLightningError)
        await front.start()
        stack.push_async_callback(front.stop)
        yield f"http://127.0.0.1:{front.port}"


async def status(session: aiohttp.ClientSession, method: str, url: str, **options: Any) -> int:
    async with session.request(method, url, **options) as answer:
        found = await answer.json(content_type=None) if answer.status in (403, 415) else {}
        assert answer.status not in (403, 415) or (found["detail"] and found["error"]["message"])
        return answer.status


@pytest.mark.parametrize("kind", PATHS)
async def test_pages_of_others_reach_no_server(kind: str, tmp_path: Path) -> None:
    plain = {"content-type": JSON}
    foreign = [
        {**plain, "Host": "evil.example"},
        {**plain, "Host": "127.0.0.1.evil.example:80"},
        {**plain, "Host": "localhost@evil.example"},
        {**plain, "Origin": "http://evil.example"},
        {**plain, "Origin": "null"},
        {**plain, "Origin": "http://127.0.0.1:1"},
        {**plain, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {**plain, "Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
    ]
    async with served(kind, tmp_path) as url, aiohttp.ClientSession() as session:
        for path in PATHS[kind]:
            for headers in foreign:
                for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
                    assert await status(session, method, url + path, headers=headers) == 403, (path, method, headers)
            for wrong in (
                "text/plain",
                "application/x-www-form-urlencoded",
                "multipart/form-data; boundary=x",
                "",
                "x",
            ):
                headers = {"content-type": wrong}
                assert await status(session, "POST", url + path, data=b"{}", headers=headers) == 415, (path, wrong)
            skip = {"skip_auto_headers": ["content-type"]}
            assert await status(session, "POST", url + path, data=b"{}", **skip) == 415, path
        for path in ("/", "/health", "/docs", "/metrics", "/v1/models", "/nowhere"):
            assert await status(session, "GET", url + path, headers={"Host": "evil.example"}) == 403, path


@pytest.mark.parametrize("kind", PATHS)
async def test_programs_of_this_machine_reach_them(kind: str, tmp_path: Path) -> None:
    async with served(kind, tmp_path) as url, aiohttp.ClientSession() as session:
        port = url.rpartition(":")[2]
        for headers in (
            {},
            {"Host": "localhost:8080"},  # a tunnel
            {"Host": f"[::1]:{port}"},
            {"Origin": f"http://127.0.0.1:{port}"},
            {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},  # a link to it
        ):
            assert await status(session, "POST", url + PATHS[kind][0], json={}, headers=headers) not in (403, 415)
        for given in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
            headers = {"content-type": given}
            assert await status(session, "POST", url + PATHS[kind][0], data=b"{}", headers=headers) not in (403, 415)


def asked(guard: Guard, method: str = "GET", **headers: str) -> int:
    found = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    refusal = guard.refusal({"type": "http", "method": method, "headers": found})
    return 200 if refusal is None else refusal[0]


OWN = "127.0.0.1:4747"


async def nothing(*_: Any) -> None:
    raise AssertionError


@pytest.mark.parametrize(
    ("listens", "host", "expected"),
    [
        ("0.0.0.0", "10.1.2.3:4747", 200),
        ("0.0.0.0", "[fe80::1]:4747", 200),
        ("0.0.0.0", "agl-store:4747", 200),  # nobody can register it
        ("0.0.0.0", "store.example.com", 403),
        ("0.0.0.0", "10.1.2.3.evil.example", 403),
        ("box.example.com", "BOX.example.com:80", 200),
        ("127.0.0.1", "10.1.2.3", 403),
        ("127.0.0.1", "agl-store", 403),
        ("::1", "[::1]:1", 200),
        ("127.0.0.1", "a.localhost", 200),
        ("127.0.0.1", "", 403),
        ("127.0.0.1", "localhost:80:90", 403),
    ],
)
def test_the_names_of_a_server(listens: str, host: str, expected: int) -> None:
    assert asked(Guard(nothing, listens), host=host) == expected


def test_other_names_are_allowed_by_the_option_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_HOSTS, "a.example, .b.example")
    guard = Guard(nothing, "127.0.0.1", ["C.example"])
    for name, expected in {"a.example": 200, "b.example:1": 200, "x.b.example": 200, "c.example": 200}.items():
        assert asked(guard, host=name) == expected
        assert asked(guard, host=name, origin=f"https://{name}") == expected
        assert asked(guard, host="127.0.0.1:4747", origin=f"https://{name}") == expected  # behind a proxy
    for name in ("x.a.example", "xb.example", "d.example"):
        assert asked(guard, host=name) == asked(guard, host="localhost", origin=f"http://{name}") == 403
    for wrong in ("http://a.example", "a.example:80", "*", " ", "a/b"):
        with pytest.raises(ConfigError):
            Guard(nothing, "127.0.0.1", [wrong])


def test_a_client_of_the_last_century_names_no_host() -> None:
    assert asked(Guard(nothing, "127.0.0.1")) == 200  # browsers always do
    assert asked(Guard(nothing, "127.0.0.1"), origin="null") == 403


@pytest.mark.parametrize(
    "twice", [("origin", "http://evil.example", f"http://{OWN}"), ("content-type", "text/plain", JSON)]
)
def test_a_header_that_stands_twice_is_as_bad_as_its_worst_value(twice: tuple[str, str, str]) -> None:
    name, *values = twice
    for first, second in (values, reversed(values)):
        given = {"host": OWN, "content-length": "2", "content-type": JSON}
        given.pop(name, None)
        headers = [(n.encode(), v.encode()) for n, v in (*given.items(), (name, first), (name, second))]
        refusal = Guard(nothing, "127.0.0.1").refusal(
            {"type": "http", "method": "POST", "path": "/", "headers": headers}
        )
        assert (refusal or (200,))[0] in (403, 415)


def test_a_compressed_body_is_named_but_for_spans_of_exporters() -> None:
    guard = Guard(nothing, "127.0.0.1")
    given = {"content-type": JSON, "content-length": "9"}
    for path, encoding, status in (
        ("/v1/chat/completions", "gzip", 415),
        ("/v1/chat/completions", "Br", 415),
        ("/v1/chat/completions", "identity", 200),
        ("/rollout/a/attempt/b/v1/traces", "gzip", 200),
        ("/v1/traces", "gzip", 200),
    ):
        headers = [(n.encode(), v.encode()) for n, v in {**given, "content-encoding": encoding}.items()]
        refusal = guard.refusal({"type": "http", "method": "POST", "path": path, "headers": headers})
        assert (refusal or (200,))[0] == status
        assert refusal is None or "Send it as it is" in refusal[1]


def test_bodies_are_what_their_type_says_for_every_method() -> None:
    guard = Guard(nothing, "127.0.0.1")
    for method in ("POST", "PUT", "PATCH", "DELETE", "QUERY"):
        for length in ({"content_length": "2"}, {"transfer_encoding": "chunked"}):
            assert asked(guard, method, content_type="text/plain", **length) == 415
            assert asked(guard, method, **length) == 415
            for kind in (JSON, "application/x-protobuf", "application/vnd.msgpack"):
                assert asked(guard, method, content_type=kind, **length) == 200
        assert asked(guard, method) == asked(guard, method, content_length="0") == 200


async def test_a_server_of_a_model_names_the_one_that_trains(tmp_path: Path) -> None:
    async with served("gateway", tmp_path) as url, aiohttp.ClientSession() as session:
        form = aiohttp.FormData({"purpose": "fine-tune"})
        form.add_field("file", b"{}", filename="chats.jsonl")
        async with session.post(f"{url}/v1/files", data=form) as answer:
            assert "agl serve MODEL --training FOLDER" in (await answer.json())["error"]["message"]
        for path in ("/v1/fine_tuning/jobs", "/api/v1/create_session"):
            async with session.post(url + path, json={}) as answer:
                assert "agl serve MODEL --training FOLDER" in await answer.text(), path
        async with session.post(f"{url}/v1/images", json={}) as answer:
            assert "--training" not in await answer.text()
