"""`python -m tests.backend.ray.fake_vllm serve MODEL --host H --port N …`: a program like `vllm`, with real weights.

It answers nobody who does not know the key in VLLM_API_KEY, as vLLM does with what we give it to ask first.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from aiohttp import web

from ..vllm.fake import FakeVLLM
from ..vllm.on_fake import TorchModel


@web.middleware
async def ask_for_the_key(request: web.Request, handler: Any) -> web.StreamResponse:
    if request.headers.get("Authorization") != f"Bearer {os.environ['VLLM_API_KEY']}":
        return web.Response(status=401)
    return await handler(request)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    known, _ = parser.parse_known_args()
    app = FakeVLLM(TorchModel(known.model), TorchModel).app()
    app.middlewares.append(ask_for_the_key)
    web.run_app(app, host=known.host, port=known.port, print=None)
