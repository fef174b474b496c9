"""Backends: where engines and learners live, and how weights get across. A new one is a file and a line below."""

from __future__ import annotations

from importlib import import_module

from agentlightning.backend.base import (
    POLICY,
    Backend,
    BackendFactory,
    BackendStats,
    ModelSettings,
    ModelSpec,
)
from agentlightning.errors import ConfigError

BACKENDS: dict[str, str] = {
    "embedded": "agentlightning.backend.embedded.backend:EmbeddedBackend",
    "inprocess": "agentlightning.backend.inprocess:InProcessBackend",
}
"""By name, where the class is; it is imported when it is asked for."""


def check_backend(kind: str | BackendFactory) -> None:
    """Raises ConfigError for what is no backend."""
    if kind not in BACKENDS if isinstance(kind, str) else not callable(kind):
        known = " or ".join(repr(name) for name in BACKENDS)
        raise ConfigError(f"backend is {kind!r}; it can be {known}, or a callable that makes one from a ModelSpec.")


def make_backend(kind: str | BackendFactory, spec: ModelSpec) -> Backend:
    """A backend, not started yet. Raises ConfigError for what is no backend."""
    check_backend(kind)
    if not isinstance(kind, str):
        return kind(spec)
    module, _, name = BACKENDS[kind].partition(":")
    return getattr(import_module(module), name)(spec)


__all__ = [
    "BACKENDS",
    "POLICY",
    "Backend",
    "BackendFactory",
    "BackendStats",
    "ModelSettings",
    "ModelSpec",
    "check_backend",
    "make_backend",
]
