"""Backends: where engines and learners live, and how weights get across. A new one is a file and a line below."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from agentlightning.arguments import can_be
from agentlightning.backend.base import (
    POLICY,
    Backend,
    BackendFactory,
    BackendStats,
    ComputeSettings,
    Drain,
    Drains,
    ModelSettings,
    ModelSpec,
    TakesUp,
    drain_of,
)
from agentlightning.errors import ConfigError

BACKENDS: dict[str, str] = {
    "embedded": "agentlightning.backend.embedded.backend:EmbeddedBackend",
    "inprocess": "agentlightning.backend.embedded.backend:InProcessBackend",
    "ray": "agentlightning.backend.ray.backend:RayBackend",
    "vllm": "agentlightning.backend.vllm.backend:VLLMBackend",
}
"""By name, where the class is; it is imported when it is asked for."""

OPTIONS: dict[str, str] = {
    "ray": "agentlightning.backend.ray.options:parse_options",
    "vllm": "agentlightning.backend.vllm.options:parse_options",
}
"""By the name of a backend, what reads its `backend_options`; the others have none."""


_GPUS = "Several GPUs or machines are 'ray', with ranks=…."
_LOCAL = "'embedded' computes with torch and transformers, on this CPU or on a GPU (device='cuda')."
_SERVES = (
    "That serves models and trains none. Training needs a model's own weights: a Hugging Face id or a folder, and one "
    "of these. Prompts are improved on any endpoint: agl optimize --endpoint URL."
)
_OTHERS: dict[str, str] = {
    **dict.fromkeys(("sglang", "tgi", "lmdeploy", "tensorrt", "trtllm"), "Of servers for GPUs it takes vLLM: 'vllm'."),
    **dict.fromkeys(("hf", "huggingface", "transformers", "torch", "pytorch", "local", "cpu", "cuda", "gpu"), _LOCAL),
    **dict.fromkeys(("deepspeed", "fsdp", "ddp", "accelerate", "megatron", "verl", "trl", "distributed"), _GPUS),
    **dict.fromkeys(("ollama", "llamacpp", "lmstudio", "mlx", "gguf", "openai", "azure", "litellm"), _SERVES),
}
"""Names that people know from elsewhere, without signs between letters, and what they want here."""


def check_backend(kind: str | BackendFactory, options: Mapping[str, Any] | None = None) -> None:
    """Raises ConfigError for what is no backend, and for options that it does not have."""
    if kind not in BACKENDS if isinstance(kind, str) else not callable(kind):
        meant = _OTHERS.get(re.sub("[^a-z]", "", kind.lower()), "") if isinstance(kind, str) else ""
        known = can_be(kind, BACKENDS, "a callable that makes one from a ModelSpec")
        raise ConfigError(f"backend is {kind!r}; {known} {meant}".rstrip())
    if options and isinstance(kind, str):
        if not isinstance(options, Mapping):
            example = "backend_options={'replicas': 2}"
            raise ConfigError(f"backend_options is {options!r}; it takes values by name, for example {example}.")
        if kind not in OPTIONS:
            raise ConfigError(f"backend_options: the backend '{kind}' has none, so they would have no effect.")
        _find(OPTIONS[kind])(options)


def make_backend(kind: str | BackendFactory, spec: ModelSpec) -> Backend:
    """A backend, not started yet. Raises ConfigError for what is no backend."""
    check_backend(kind)
    if not isinstance(kind, str):
        return kind(spec)
    return _find(BACKENDS[kind])(spec)


def _find(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


__all__ = [
    "BACKENDS",
    "POLICY",
    "Backend",
    "BackendFactory",
    "BackendStats",
    "ComputeSettings",
    "Drain",
    "Drains",
    "ModelSettings",
    "ModelSpec",
    "TakesUp",
    "check_backend",
    "drain_of",
    "make_backend",
]
