"""A small vLLM server: the HTTP API that the backend uses, as the real one answers it, over a model of a few lines.

Seen at vLLM 0.32: paths, bodies, error texts, what is ignored. It keeps contexts in a prefix cache and forgets them
when it is paused, so what a client that does not pause would get can be seen. `python fake.py serve MODEL
--port N …` is a server process whose model is uniform; variables of its environment let it die.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from aiohttp import web

from agentlightning.backend.vllm.worker.agl_vllm_worker import Publication


class Model(Protocol):
    """Weights."""

    def next_logits(self, ids: list[int], cache: dict[Any, Any]) -> np.ndarray:
        """Of the token behind `ids`, [V]; `cache` holds what these weights, or others, computed before."""
        ...


class Uniform:
    """Every token is as probable as any other."""

    def next_logits(self, ids: list[int], cache: dict[Any, Any]) -> np.ndarray:
        return np.zeros(64, dtype=np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def as_float(value: Any) -> float:
    """JSON has no infinity; vLLM writes so in its place."""
    return float(max(value, -9999.0))


class FakeVLLM:
    """`load` makes a model of a directory."""

    keeps_contexts = False
    """A server that does not forget its contexts when it is paused."""

    def __init__(self, base: Model, load: Callable[[str], Model], *, dies_after: int | None = None) -> None:
        self.base, self._load = base, load
        self.adapters: dict[str, Model] = {}
        self.version = "default"
        self.requests: list[dict[str, Any]] = []
        self.said: list[str] = []
        """Paths of what was asked besides sampling, in order."""
        self._cache: dict[str | None, dict[Any, Any]] = {}
        """By adapter."""
        self._running = asyncio.Event()
        self._running.set()
        self._dies_after = dies_after
        self._worker = Publication()
        self._worker.rank = 0

    def app(self) -> web.Application:
        app = web.Application()
        for path in ("pause", "resume", "collective_rpc", "update_weight_version", "reset_prefix_cache"):
            app.router.add_post(f"/{path}", getattr(self, path))
        app.router.add_post("/v1/load_lora_adapter", self.load_lora_adapter)
        app.router.add_post("/v1/unload_lora_adapter", self.unload_lora_adapter)
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in ("base", *self.adapters)]})

    # ---- weights ---------------------------------------------------------------------------------------------------

    async def pause(self, request: web.Request) -> web.Response:
        self.said.append("pause")
        self._running.clear()
        if not self.keeps_contexts:
            self._cache.clear()
        return web.json_response({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        self.said.append("resume")
        self._running.set()
        return web.json_response({"status": "resumed"})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["method"] == "agl_damaged":
            return web.json_response({"results": [self.damaged(*body["args"])]})
        if body["method"] in ("agl_receive", "agl_received", "agl_drop"):
            try:
                said = await asyncio.to_thread(getattr(self, body["method"]), *body["args"])
            except (RuntimeError, OSError, TimeoutError) as error:
                return _refused(500, str(error))
            return web.json_response({"results": [said]})
        assert body["method"] == "agl_load_weights", body
        self.said.append("load")
        (path,) = body["args"]
        self.take_weights(path)
        return web.json_response({"results": [path]})

    def damaged(self, path: str, sums: str) -> list[str]:
        """What the worker of ours says that is mixed into vLLM's."""
        return self._worker.agl_damaged(path, sums)

    def agl_receive(self, name: str, terms: str, rank: int, root: str) -> str:
        return self._worker.agl_receive(name, terms, rank, root)

    def agl_received(self, name: str) -> str:
        return self._worker.agl_received(name)

    def agl_drop(self, name: str) -> None:
        self._worker.agl_drop(name)

    def take_weights(self, path: str) -> None:
        self.base = self._load(path)

    async def update_weight_version(self, request: web.Request) -> web.Response:
        self.said.append("version")
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.version})

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        self._cache.clear()
        return web.json_response({"success": True})

    async def load_lora_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["lora_name"] in self.adapters:
            return _refused(400, f"The lora adapter '{body['lora_name']}' has already been loaded.")
        self.adapters[body["lora_name"]] = self.adapter(body["lora_path"])
        return web.Response(text="Success")

    def adapter(self, path: str) -> Model:
        return self._load(path)

    async def unload_lora_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return _refused(404, f"The lora adapter '{name}' cannot be found.")
        return web.Response(text="Success")

    # ---- sampling --------------------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if self._dies_after is not None and len(self.requests) > self._dies_after:
            os.write(2, b"RuntimeError: out of luck\n")
            os._exit(1)
        name = body.get("model")
        if name is not None and name not in self.adapters:
            return _refused(404, f"The model `{name}` does not exist.")
        key = f"generate-tokens-{len(self.requests)}"
        scored = self._score(body, name)
        parts = self._sample(body, name)
        usage = {"prompt_tokens": len(body["token_ids"]), "prompt_tokens_details": {"cached_tokens": 0}}
        if not body.get("stream"):
            choice = await _whole(parts)
            counted = {**usage, "completion_tokens": len(choice["token_ids"])}
            answer = {"request_id": key, "usage": counted, "prompt_logprobs": scored, "choices": [choice]}
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = 0
        async for choice in parts:
            count += 1
            await response.write(_event({"request_id": key, "usage": None, "choices": [choice]}))
        await response.write(_event({"request_id": key, "usage": {**usage, "completion_tokens": count}, "choices": []}))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _model(self, name: str | None) -> Model:
        return self.base if name is None else self.adapters[name]

    def _score(self, body: dict[str, Any], name: str | None) -> list[dict[str, Any] | None] | None:
        """Log-probs of the prompt's tokens, at temperature 1 whatever the request's is."""
        top = body["sampling_params"].get("prompt_logprobs")
        if top is None:
            return None
        rows: list[dict[str, Any] | None] = [None]
        ids = body["token_ids"]
        for place in range(1, len(ids)):
            row = log_softmax(self._model(name).next_logits(ids[:place], {}))
            best = np.argsort(-row, kind="stable")[:top].tolist()
            rows.append({str(i): {"logprob": as_float(row[i]), "rank": 1} for i in (ids[place], *best)})
        return rows

    async def _sample(self, body: dict[str, Any], name: str | None) -> AsyncGenerator[dict[str, Any], None]:
        """Choices with one token each; the last one has the reason and the weight versions."""
        asked = body["sampling_params"]
        temperature = asked.get("temperature", 1.0)
        random = np.random.default_rng(asked.get("seed"))
        ids, versions = list(body["token_ids"]), list[str]()
        limit, reason = asked["max_tokens"], None
        while reason is None:
            await self._running.wait()
            row = log_softmax(
                self._model(name).next_logits(ids, self._cache.setdefault(name, {})) / (temperature or 1.0)
            )
            shown = _top_k(row, asked.get("top_k", 0)) if temperature else row
            token = int(random.choice(len(row), p=np.exp(shown))) if temperature else int(row.argmax())
            ids.append(token)
            versions.append(self.version)
            if token in asked.get("stop_token_ids", ()):
                reason = "stop"
            elif len(versions) == limit:
                reason = "length"
            yield {
                "index": 0,
                "finish_reason": reason,
                "stop_reason": token if reason == "stop" else None,
                "token_ids": [token],
                "weight_versions": spans_of(versions) if reason else None,
                "logprobs": {"content": [_shown(token, shown, asked.get("logprobs", 0))]},
            }
            await asyncio.sleep(0)


def _shown(token: int, row: np.ndarray, top: int) -> dict[str, Any]:
    order = [token, *np.argsort(-row, kind="stable")[:top].tolist()]
    entries = [{"token_id": i, "logprob": as_float(row[i]), "rank": 1} for i in dict.fromkeys(order)]
    return {**entries[0], "top_logprobs": entries[: max(1, top)]}


def _top_k(row: np.ndarray, k: int) -> np.ndarray:
    if not k:
        return row
    return log_softmax(np.where(row >= np.sort(row)[-k], row, -np.inf))


def spans_of(versions: list[str]) -> list[dict[str, Any]]:
    """Runs of the same version."""
    starts = [i for i, v in enumerate(versions) if i == 0 or v != versions[i - 1]]
    ends = [*starts[1:], len(versions)]
    return [{"version": versions[s], "start": s, "end": e} for s, e in zip(starts, ends, strict=True)]


async def _whole(parts: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any]:
    choices = [choice async for choice in parts]
    content = [c for choice in choices for c in choice["logprobs"]["content"]]
    ids = [i for choice in choices for i in choice["token_ids"]]
    return {**choices[-1], "token_ids": ids, "logprobs": {"content": content}}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _refused(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


@contextmanager
def served(fake: FakeVLLM) -> Iterator[str]:
    """The base URL of the server, in a thread of its own."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    urls: list[str] = []

    async def start() -> web.AppRunner:
        runner = web.AppRunner(fake.app(), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, name="fake-vllm", daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("model")
    parser.add_argument("--port", type=int)
    known, _ = parser.parse_known_args()
    if "FAKE_REFUSES" in os.environ:
        raise SystemExit("ValueError: this model is not for me")
    after = os.environ.get("FAKE_DIES_AFTER")
    fake = FakeVLLM(Uniform(), lambda path: Uniform(), dies_after=None if after is None else int(after))
    web.run_app(fake.app(), host="127.0.0.1", port=known.port, print=None)
