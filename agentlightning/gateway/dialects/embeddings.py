"""OpenAI's embeddings: programs that ask another provider for text ask it for vectors, too, at the same base URL.

Such a call is recorded as it is. The models that the gateway samples from have no vectors to give.
"""

from __future__ import annotations

from typing import NoReturn

import msgspec

from agentlightning.gateway.dialects.base import Answered, Body, Dialect, Fields, openai_error
from agentlightning.gateway.exchange import Answer, CallRequest, Refusal
from agentlightning.rendering import Rendering


class EmbeddingsDialect(Dialect):
    """`POST /embeddings`, for other providers only."""

    name = "embeddings"
    title = "Embeddings"
    paths = ("/embeddings",)
    id_prefix = "embd-"
    fields = Fields(honoured=("model", "input"))

    def parse(self, body: Body, answered: Answered) -> CallRequest:
        model = str(body.get("model"))[:200]
        raise Refusal(
            f"The model '{model}' has no embeddings here: what is trained writes text. Name a provider that has them, "
            f"models={{'{model}': agl.Provider(base_url=…, api_key=…)}} or --upstream {model}=URL, or give the "
            "embeddings' client that provider's own address and key.",
            param="model",
        )

    def respond(self, request: CallRequest, reply: Answer, rendering: Rendering) -> NoReturn:
        raise NotImplementedError("no request for embeddings is answered here")

    def writer(self, request: CallRequest, response_id: str, created: int, rendering: Rendering) -> NoReturn:
        raise NotImplementedError("no request for embeddings is answered here")

    def refuse(self, refusal: Refusal) -> bytes:
        return msgspec.json.encode(openai_error(refusal))
