"""The requests made of a cluster's API server, each repeated while a repeat may heal what went wrong."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from agentlightning.errors import ExecutorError
from agentlightning.litagent.kubernetes.manifests import ACCOUNT, CONTAINER, Kubernetes, server_of
from agentlightning.litagent.process import Output
from agentlightning.reading import whole_number

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

T = TypeVar("T")

API_SECONDS = 60.0
"""How long a request is repeated that is not answered, or refused for the moment."""
WATCH_PAUSE_SECONDS = 1.0
"""After a watch that broke."""
_AGAIN = (429, 500, 502, 503, 504)


class ApiRefusal(ExecutorError):
    """The API server said no, and would say it again."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.reason, message = status, "", body[:300].decode(errors="replace")
        with suppress(ValueError, AttributeError):  # a proxy in between answers as it likes
            answer = json.loads(body)
            self.reason, message = answer.get("reason") or "", answer.get("message") or message
        super().__init__(f"The cluster refused it ({status}): {message}")


class ClusterApi:
    """One cluster's API server, and the namespace that Jobs are made in."""

    def __init__(self, http: aiohttp.ClientSession, url: str, namespace: str, *, inside: bool) -> None:
        self._http, self.url, self.namespace, self._inside = http, url, namespace, inside

    @classmethod
    @asynccontextmanager
    async def opened(cls, cluster: Kubernetes) -> AsyncIterator[ClusterApi]:
        import aiohttp

        from agentlightning.net.outgoing import http_session

        url, inside = server_of(cluster)
        namespace = cluster.namespace or (_account("namespace") if inside else "default")
        trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt")) if inside else True
        connector = aiohttp.TCPConnector(ssl=trusted)
        async with http_session(connector=connector, read_bufsize=2**20) as http:  # a watched pod is one line
            yield cls(http, url, namespace, inside=inside)

    @property
    def owner(self) -> Mapping[str, Any] | None:
        """The pod that we are, if it is in the Jobs' namespace: they go when it goes."""
        name, uid = os.environ.get("AGL_POD_NAME"), os.environ.get("AGL_POD_UID")
        if not self._inside or not name or not uid or _account("namespace") != self.namespace:
            return None
        return {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}

    async def ask(self, method: str, kind: str, name: str = "", *, body: Any = None, **query: str) -> dict[str, Any]:
        """The answer's JSON. Raises ExecutorError."""

        async def read(response: aiohttp.ClientResponse) -> dict[str, Any]:
            return await response.json(content_type=None)

        return await self._until_answered(read, method, self._at(kind, name), json=body, params=query)

    async def make(self, kind: str, manifest: Mapping[str, Any]) -> dict[str, Any] | None:
        """Make it; None where there is one of this name."""
        try:
            return await self.ask("POST", kind, body=manifest)
        except ApiRefusal as refused:
            if refused.reason != "AlreadyExists":
                raise
            return None

    async def remove(self, job: str) -> None:
        """Delete a Job, and with it its pod and its Secret. It may be gone."""
        try:
            await self.ask("DELETE", "jobs", job, propagationPolicy="Background")
        except ApiRefusal as refused:
            if refused.status != 404:
                raise

    async def log(self, pod: str, most: int) -> Output:
        """What the program wrote to its output and its error output, in one."""

        async def read(response: aiohttp.ClientResponse) -> Output:
            output = Output()
            async for part in response.content.iter_any():
                output.add(part)
            return output

        query = {"container": CONTAINER, "limitBytes": str(most)}
        return await self._until_answered(read, "GET", self._at("pods", f"{pod}/log"), params=query)

    async def news(self, selector: str, version: str, seconds: float) -> None:
        """Return at the next change of these pods, when the time is over, or soon after the watch broke."""
        import aiohttp

        query = {"watch": "1", "labelSelector": selector, "resourceVersion": version}
        query["timeoutSeconds"] = str(max(1, int(seconds)))
        allowed = aiohttp.ClientTimeout(total=seconds + 10)
        try:
            async with self._request("GET", self._at("pods"), params=query, timeout=allowed) as response:
                async for line in response.content:
                    if response.status == 200 and json.loads(line).get("type") != "ERROR":
                        return
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            logger.debug("A watch broke: %s", error)
        await asyncio.sleep(WATCH_PAUSE_SECONDS)

    async def _until_answered(
        self, read: Callable[[aiohttp.ClientResponse], Awaitable[T]], method: str, url: str, **options: Any
    ) -> T:
        import aiohttp

        from agentlightning.net.outgoing import UnwantedAnswer

        end, pause = time.monotonic() + API_SECONDS, 0.25
        while True:
            after = 0.0
            try:
                allowed = aiohttp.ClientTimeout(total=API_SECONDS, sock_read=30.0)
                async with self._request(method, url, timeout=allowed, **options) as response:
                    if response.status < 300:
                        return await read(response)
                    refused = ApiRefusal(response.status, await response.read())
                    if response.status not in _AGAIN and refused.reason != "Conflict":
                        raise refused
                    why, after = str(refused), _seconds(response.headers.get("Retry-After"))
            except (
                aiohttp.ClientError,
                TimeoutError,
                OSError,
                ValueError,
            ) as error:  # a proxy may answer what is no JSON
                why = str(error) or type(error).__name__
                if isinstance(error, UnwantedAnswer):
                    end = 0.0
            if time.monotonic() + after > end:
                raise ExecutorError(f"The cluster's API server at {self.url} cannot be used. {why}")
            await asyncio.sleep(max(pause, after))
            pause = min(pause * 2, 8.0)

    def _request(self, method: str, url: str, **options: Any) -> Any:
        token = {"Authorization": f"Bearer {_account('token')}"} if self._inside else {}  # it is renewed now and then
        return self._http.request(method, url, headers=token, **options)

    def _at(self, kind: str, name: str = "") -> str:
        group = "apis/batch" if kind == "jobs" else "api"
        return f"{self.url}/{group}/v1/namespaces/{self.namespace}/{kind}" + (f"/{name}" if name else "")


def _account(name: str) -> str:
    return (ACCOUNT / name).read_text().strip()


def _seconds(header: str | None) -> float:
    return float(whole_number(header or "") or 0)
