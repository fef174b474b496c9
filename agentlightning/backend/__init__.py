"""Backends: where engines and learners live, and how weights get across. A new one is a file and a line below."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from agentlightning.backend.base import (
    POLICY,
    Backend,
    BackendFactory,
    BackendStats,
    ComputeSettings,
    ModelSettings,
    ModelSpec,
    TakesUp,
)
from agentlightning.errors import ConfigError

BACKENDS: dict[str, str] = {
    "embedded": "agentlightning.backend.embedded.backend:EmbeddedBackend",
    "inprocess": "agentlightning.backend.inprocess:InProcessBackend",
    "ray": "agentlightning.backend.ray.backend:RayBackend",
    "vllm": "agentlightning.backend.vllm.backend:VLLMBackend",
}
"""By name, where the class is; it is imported when it is asked for."""

OPTIONS: dict[str, str] = {
    "ray": "agentlightning.backend.ray.options:parse_options",
    "vllm": "agentlightning.backend.vllm.options:parse_options",
}
"""By the name of a backend, what reads its `backend_options`; the others have none."""


def check_backend(kind: str | BackendFactory, options: Mapping[str, Any] | None = None) -> None:
    """Raises ConfigError for what is no backend, and for options that it does not have."""
    if kind not in BACKENDS if isinstance(kind, str) else not callable(kind):
        known = " or ".join(repr(name) for name in BACKENDS)
        raise ConfigError(f"backend is {kind!r}; it can be {known}, or a callable that makes one from a ModelSpec.")
    if options and isinstance(kind, str):
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
    "ModelSettings",
    "ModelSpec",
    "TakesUp",
    "check_backend",
    "make_backend",
]
