"""Requests to one vLLM server over HTTP, and what its refusals mean."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode, urlsplit

import aiohttp
import msgspec

from agentlightning.backend.vllm.wire import WireAnswer, read_answer
from agentlightning.errors import BackendDied, ConfigError, EngineError
from agentlightning.net.outgoing import LARGE, http_session

HEALTH_SECONDS = 40.0
"""How long a server may take to say that it is well; on a busy machine a good one may need many."""
CONTROL_SECONDS = 3600.0
"""For an answer about weights or the server itself; an answer that is sampled takes as long as its rollout may."""
_IDLE_SECONDS = 2.0
"""An idle connection is not used again after so long. vLLM closes its end after five seconds, or after what ours are
told; a request that meets that on its way is lost."""
_NAMED = 4
"""So many damaged tensors are named."""
_LARGEST_LINE = 1 << 24
"""Bytes of one part of a streamed answer."""

Sums = Mapping[str, int]
"""Checksums of weights, by the names of tensors and files; see `sums_of` in `worker/`."""


class ReplicaLost(BackendDied):
    """The server cannot be reached, or says that its engine is gone. Another one may do what was asked."""


class UnknownAdapter(ReplicaLost):
    """The server does not know the adapter that was asked for: it was unloaded, or the server is a new one."""


class VLLMApi:
    """One server. Made, used and closed in one event loop."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None
        self.sent = 0
        """Bytes of requests' bodies."""
        self.received = 0
        """Bytes of answers' bodies."""

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    async def close(self) -> None:
        """What is under way raises `ReplicaLost`. The next request opens connections again."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # ---- sampling --------------------------------------------------------------------------------------------------

    async def generate(self, body: Mapping[str, Any]) -> WireAnswer:
        """A whole answer. Cancelling this aborts the request in vLLM, which sees that nobody listens."""
        return read_answer(await self._post("/inference/v1/generate", body, sampling=True))

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[WireAnswer, None]:
        """An answer in parts, as they are sampled."""
        content = self._json({**body, "stream": True, "stream_options": {"include_usage": True}})
        try:
            async with self._client().post(self.url + "/inference/v1/generate", data=content) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.text())
                async for line in response.content:
                    self.received += len(line)
                    if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                        yield _part(line.removeprefix(b"data: "))
        except (aiohttp.ClientError, ConnectionError, ValueError) as error:
            raise _lost(self.url, error) from error

    # ---- weights ---------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Hold what is being sampled; its contexts are forgotten and computed again when it goes on."""
        await self._post("/pause?" + urlencode({"mode": "keep"}))

    async def resume(self) -> None:
        await self._post("/resume")

    async def load_weights(self, path: str) -> None:
        """Take all weights from a directory; see `worker/`."""
        answers = json.loads(await self._post("/collective_rpc", {"method": "agl_load_weights", "args": [path]}))
        if set(answers.get("results", ())) != {path}:
            raise EngineError(f"vLLM did not load the weights in {path}; it said {answers}.")

    async def check(self, path: str, sums: Sums) -> None:
        """Raises EngineError where the server sees something else in a directory than what the learner wrote there."""
        body = {"method": "agl_damaged", "args": [path, msgspec.json.encode(sums).decode()]}
        answers = json.loads(await self._post("/collective_rpc", body))
        if damaged := sorted(name for names in answers["results"] for name in names):
            raise EngineError(
                f"Weights were damaged on their way to the vLLM server at {self.url}: {_some(damaged)}. "
                "Start the run again; if it happens again, look at the machine's memory."
            )

    async def receive_weights(self, name: str, terms: str, rank: int, root: str) -> None:
        """Take part in a broadcast, and keep what comes; see `worker/`. Nothing is computed meanwhile."""
        await self._post("/collective_rpc", {"method": "agl_receive", "args": [name, terms, rank, root]})

    async def received_weights(self, name: str) -> str:
        """The directory with weights that this server received; empty if it did not."""
        answers = json.loads(await self._post("/collective_rpc", {"method": "agl_received", "args": [name]}))
        return "".join(answers["results"])

    async def drop_weights(self, name: str) -> None:
        """Remove weights that it received."""
        await self._post("/collective_rpc", {"method": "agl_drop", "args": [name]})

    async def set_version(self, version: int) -> None:
        """What the tokens that are sampled from now on are said to be of."""
        await self._post("/update_weight_version", {"new_version": str(version)})

    async def forget_contexts(self) -> None:
        await self._post("/reset_prefix_cache?" + urlencode({"reset_running_requests": "true"}))

    async def load_adapter(self, name: str, path: str) -> None:
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def unload_adapter(self, name: str) -> None:
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    # ---- the server itself -----------------------------------------------------------------------------------------

    async def is_healthy(self) -> bool:
        """Whether it answers in time that it can sample."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS), self._client().get(self.url + "/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            return False

    async def adapters(self) -> Sequence[str]:
        """The models that it serves: the base, and adapters by name."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS), self._client().get(self.url + "/v1/models") as response:
                return [model["id"] for model in (await response.json())["data"]]
        except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError, KeyError) as error:
            raise _lost(self.url, error) from error

    async def _post(self, path: str, body: Mapping[str, Any] | None = None, *, sampling: bool = False) -> bytes:
        try:
            async with (
                asyncio.timeout(None if sampling else CONTROL_SECONDS),
                self._client().post(self.url + path, data=self._json(body or {})) as response,
            ):
                text = await response.read()
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise _lost(self.url, error) from error
        self.received += len(text)
        if response.status != 200:
            raise _refusal(response.status, text.decode(errors="replace"))
        return text

    def _json(self, body: Mapping[str, Any]) -> bytes:
        raw = msgspec.json.encode(body)
        self.sent += len(raw)
        return raw

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = http_session(
                most=LARGE,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0),
                headers=self._headers,
                read_bufsize=_LARGEST_LINE,
            )
        return self._session


def _some(names: Sequence[str]) -> str:
    """The first few."""
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _part(line: bytes) -> WireAnswer:
    """Raises ReplicaLost for the message that stands in place of a part when the engine fails half-way."""
    if line.startswith(b'{"error"'):
        raise ReplicaLost(f"vLLM broke off an answer: {_message(line.decode(errors='replace'))}")
    return read_answer(line)


def _refusal(status: int, text: str) -> EngineError | ConfigError:
    message = _message(text)
    if status == 404 and "does not exist" in message:
        return UnknownAdapter(f"vLLM: {message}")
    if status in (500, 502, 503):
        return ReplicaLost(f"vLLM failed ({status}): {message}")
    if status in (403, 404):
        return EngineError(
            f"vLLM refused what this backend needs ({status}): {message}\nServers that you start yourself need the "
            "settings of docs/vllm.md."
        )
    return ConfigError(f"vLLM refused a request ({status}): {message}")


def _message(text: str) -> str:
    try:
        found = json.loads(text)
        error = found.get("error", found.get("detail", found))
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return text.strip()[:500] or "it said nothing"


def _lost(url: str, error: BaseException) -> ReplicaLost:
    return ReplicaLost(f"The vLLM server at {url} was lost: {type(error).__name__}: {error}")
