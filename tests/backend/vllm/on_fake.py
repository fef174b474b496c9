"""The vLLM backend on a fake server of its own, with the learner in a thread: all is real but vLLM and processes."""

from __future__ import annotations

import copy
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from agentlightning.backend import ModelSpec
from agentlightning.backend.embedded.backend import ServerThread
from agentlightning.backend.vllm.backend import VLLMBackend, served_by

from .fake import FakeVLLM, served

_LOADING = threading.Lock()
"""transformers loads in one thread at a time."""


class TorchModel:
    """A Hugging Face directory's weights, or an adapter's on its base."""

    def __init__(self, path: str) -> None:
        from agentlightning.learner.policy import load_policy

        with _LOADING:
            self._model = load_policy(path, device="cpu").model

    def next_logits(self, ids: list[int], cache: dict[Any, Any]) -> np.ndarray:
        """The context before the last token is computed once and kept, as vLLM's prefix cache does."""
        import torch

        with torch.no_grad():
            key = tuple(ids[:-1])
            if key not in cache:
                cache[key] = self._model(torch.tensor([ids[:-1]])).past_key_values if key else None
            past = copy.deepcopy(cache[key])
            return self._model(torch.tensor([ids[-1:]]), past_key_values=past).logits[0, -1].numpy()


class VLLMOnFake(VLLMBackend):
    """`fake` is the kind of server that it starts."""

    spawn = staticmethod(ServerThread.spawn)
    fake: type[FakeVLLM] = FakeVLLM

    def __init__(self, spec: ModelSpec) -> None:
        self._servers = ExitStack()
        self.server = self.fake(TorchModel(served_by(spec).model), TorchModel)
        url = self._servers.enter_context(served(self.server))
        super().__init__(replace(spec, backend_options={"urls": [url], "start_seconds": 60.0}))

    async def close(self) -> None:
        await super().close()
        self._servers.close()


class LoraOnFake(VLLMOnFake):
    """The same with an adapter in training, whatever the spec says."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(replace(spec, lora_rank=4))


class KeepsOldWeights(FakeVLLM):
    """Says that it took the weights."""

    def take_weights(self, path: str) -> None:
        pass


class KeepsOldHead(FakeVLLM):
    """What vLLM on a CPU does by itself where the output layer is tied to the embeddings: that layer stays."""

    def take_weights(self, path: str) -> None:
        import torch

        old: Any = self.base
        new: Any = TorchModel(path)
        head = copy.deepcopy(old._model.get_output_embeddings().weight.detach())
        new._model.lm_head = torch.nn.Linear(head.shape[1], head.shape[0], bias=False)
        new._model.lm_head.weight = torch.nn.Parameter(head)
        self.base = new


class KeepsContexts(FakeVLLM):
    """Goes on with contexts that the old weights computed."""

    keeps_contexts = True


class IgnoresAdapters(FakeVLLM):
    """Loads adapters and samples from the base."""

    def adapter(self, path: str) -> Any:
        return self.base


class LabelsOld(FakeVLLM):
    """Its tokens never carry the new version."""

    async def update_weight_version(self, request: Any) -> Any:
        if self.version == "default":
            return await super().update_weight_version(request)
        from aiohttp import web

        return web.json_response({"success": True})


class FlipsABit(FakeVLLM):
    """What it reads is not what was written, by one bit of one tensor."""

    def damaged(self, path: str, sums: str) -> list[str]:
        (file,) = Path(path).glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        return super().damaged(path, sums)


class HangsUp(FakeVLLM):
    """When it is asked for something of its workers the next time, the connection is gone."""

    soon = False

    async def collective_rpc(self, request: Any) -> Any:
        if self.soon:
            self.soon = False
            request.transport.abort()
        return await super().collective_rpc(request)
