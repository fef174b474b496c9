"""A test's own hands in a cluster, ours or a real one."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from tests.litagent.cluster.kubelet import MERGE

OURS = "app.kubernetes.io/part-of=agentlightning"
GROUPS = {"jobs": "apis/batch/v1", "pods": "api/v1", "secrets": "api/v1"}

Json = dict[str, Any]


class Admin:
    """May do everything in one namespace."""

    def __init__(self, http: aiohttp.ClientSession, url: str, namespace: str) -> None:
        self._http, self._url, self._namespace = http, url, namespace

    async def prepare(self) -> None:
        """Make the namespace, and wait until pods can be made in it."""
        await self._ask("POST", f"{self._url}/api/v1/namespaces", {"metadata": {"name": self._namespace}})
        account = f"{self._url}/api/v1/namespaces/{self._namespace}/serviceaccounts/default"
        async with asyncio.timeout(30):
            while not (await self._ask("GET", account)).get("metadata", {}).get("uid"):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def all(self, kind: str) -> list[Json]:
        """Those that were made for attempts."""
        return (await self._ask("GET", f"{self._at(kind)}?labelSelector={OURS}"))["items"]

    async def make(self, kind: str, manifest: Json) -> None:
        await self._ask("POST", self._at(kind), manifest)

    async def change(self, kind: str, name: str, change: Json) -> None:
        await self._ask("PATCH", f"{self._at(kind)}/{name}", change)

    async def delete(self, kind: str, name: str) -> None:
        await self._ask("DELETE", f"{self._at(kind)}/{name}?propagationPolicy=Background")

    def _at(self, kind: str) -> str:
        return f"{self._url}/{GROUPS[kind]}/namespaces/{self._namespace}/{kind}"

    async def _ask(self, method: str, url: str, body: Any = None) -> Json:
        headers = {"X-Kubelet": "admin"} | (MERGE if method == "PATCH" else {})
        async with self._http.request(method, url, json=body, headers=headers) as response:
            answer = await response.json()
            assert response.status < 300 or method == "GET", answer
            return answer
