"""Who may look at the dashboard, and what the browser is forbidden."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from agentlightning.dashboard import Dashboard, served_with_dashboard
from agentlightning.errors import StoreError
from agentlightning.net.guard import is_local_name
from agentlightning.net.server import LoopServer
from agentlightning.store import LightningStoreServer, SqliteLightningStore
from tests.dashboard.conftest import Ask, send


@pytest.fixture
async def network(store: SqliteLightningStore) -> AsyncIterator[str]:
    """The URL of a dashboard as it is served to a network."""
    server = LoopServer(
        Dashboard(store, key="the-key", loopback=False), "127.0.0.1", 0, what="dashboard", error=StoreError
    )
    await server.start()
    yield f"http://127.0.0.1:{server.port}/dashboard/api"
    await server.stop()


async def test_a_network_logs_in_with_the_key(network: str) -> None:
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:

        async def status(method: str, path: str, **options: Any) -> int:
            return (await send(session, method, network + path, **options))[0]

        for path in ("/runs", "/rollouts", "/news", "/nowhere", "/rollouts/good/tokens"):
            assert await status("GET", path) == 401, path
        assert '"allowed":false' in (await send(session, "GET", f"{network}/session"))[2]
        assert await status("POST", "/login", json={"key": "another"}) == 401
        assert await status("POST", "/login", json={"key": "x" * 10_000}) == 413
        assert await status("POST", "/login", json=["the-key"]) == 422
        _, headers, _ = await send(session, "POST", f"{network}/login", json={"key": "the-key"})
        cookie = headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert "the-key" not in cookie
        assert await status("GET", "/runs") == 200
        assert await status("POST", "/logout") == 200
        assert await status("GET", "/runs") == 401
        assert await status("GET", "/runs", headers={"Authorization": "Bearer the-key"}) == 200


async def test_on_loopback_one_only_looks(server: LightningStoreServer, ask: Ask) -> None:
    assert (await ask("/session"))["allowed"]
    async with aiohttp.ClientSession() as session:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert (await send(session, method, f"{server.endpoint}/dashboard/api/runs"))[0] == 405
        assert (await send(session, "GET", f"{server.endpoint}/v1/agl/runs"))[0] == 401  # the store wants its key


async def test_other_sites_are_kept_out(ask: Ask) -> None:
    await ask("/runs", 403, headers={"Host": "rebound.example"})
    await ask("/runs", 403, headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"})
    await ask("/runs", headers={"Host": "localhost:1234"})


@pytest.mark.parametrize(
    ("name", "local"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("x.localhost", True), ("127.0.0.1.evil.com", False)],
)
def test_names_that_mean_this_machine(name: str, local: bool) -> None:
    assert is_local_name(name) is local


async def test_the_page_allows_only_its_own_files(server: LightningStoreServer) -> None:
    async with aiohttp.ClientSession() as session:
        _, headers, page = await send(session, "GET", f"{server.endpoint}/")  # leads to the pages
        policy = headers["content-security-policy"]
        nonce = re.search(r"'nonce-([\w-]+)'", policy)
        assert nonce is not None
        assert f'content="{nonce[1]}"' in page
        assert "__NONCE__" not in page
        assert "default-src 'none'; script-src 'self';" in policy
        assert "unsafe" not in policy
        _, again, _ = await send(session, "GET", f"{server.endpoint}/dashboard/runs/anything")
        assert again["content-security-policy"] != policy  # a nonce is used once
        assets = re.findall(r'(?:src|href)="(/dashboard/assets/[^"]+)"', page)
        assert len(assets) >= 2
        for asset in assets:
            status, headers, _ = await send(session, "GET", server.endpoint + asset)
            assert (status, headers["cache-control"]) == (200, "no-cache")
            known = {"If-None-Match": headers["etag"]}
            assert (await send(session, "GET", server.endpoint + asset, headers=known))[0::2] == (304, "")
        for name in ("..%2findex.html", "%2e%2e%2f%2e%2e%2fapp.py", "none.js"):
            _, _, text = await send(session, "GET", f"{server.endpoint}/dashboard/assets/{name}")
            assert "import " not in text
        for name in ("a" * 5000, "%00", "..", "a/b"):
            assert (await send(session, "GET", f"{server.endpoint}/dashboard/assets/{name}"))[0] in (200, 404)


async def test_an_open_store_shows_its_dashboard_too(store: SqliteLightningStore) -> None:
    server = served_with_dashboard(store, port=0)
    await server.start()
    async with aiohttp.ClientSession() as session:
        for path in ("/dashboard/api/runs", "/v1/agl/health"):
            assert (await send(session, "GET", server.endpoint + path))[0] == 200
    await server.stop()
