"""Parts of the trainer given as a class, a factory, an import path, a registered name or a dictionary."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from agentlightning.errors import ConfigError

REGISTRY = {
    "shm": "agentlightning.compat.execution.SharedMemoryExecutionStrategy",
    "cs": "agentlightning.compat.execution.ClientServerExecutionStrategy",
}
"""Names that strategies had."""


def build_component(
    spec: Any,
    *,
    expected_type: type | None = None,
    spec_name: str = "component",
    default_factory: Callable[[], Any] | None = None,
    allow_none: bool = True,
    optional_defaults: Mapping[str, Any] | None = None,
    dict_requires_type: bool = True,
    dict_default_cls: Callable[..., Any] | None = None,
    type_error_fmt: str | None = None,
    invalid_spec_error_fmt: str | None = None,
    registry: Mapping[str, str] | None = None,
) -> Any:
    """The object that `spec` describes; `optional_defaults` are arguments that are given where they are taken.

    Raises ConfigError for what describes none, or one of another type.
    """
    if spec is None:
        if default_factory is not None:
            return default_factory()
        if allow_none:
            return None
        raise ConfigError(f"{spec_name} is missing.")
    if expected_type is not None and isinstance(spec, expected_type):
        return spec
    defaults = dict(optional_defaults or {})
    known = {**REGISTRY, **(registry or {})}
    if isinstance(spec, str):
        made = _make(_named(spec, known, spec_name), {}, defaults)
    elif isinstance(spec, Mapping):
        given = dict(spec)
        named = given.pop("type", None) or given.pop("name", None)
        if named is None and (dict_requires_type or dict_default_cls is None):
            raise ConfigError(f"{spec_name} is a dictionary without 'type': the import path of its class.")
        maker = (
            dict_default_cls if named is None else _named(named, known, spec_name) if isinstance(named, str) else named
        )
        made = _make(maker, given, defaults)
    elif callable(spec):
        made = _make(spec, {}, defaults)
    else:
        raise ConfigError(f"{spec_name} is {spec!r}, which describes no object. Give the object itself.")
    if expected_type is not None and not isinstance(made, expected_type):
        raise ConfigError(f"{spec_name} gives a {type(made).__name__}, which is no {expected_type.__name__}.")
    return made


def _named(name: str, registry: Mapping[str, str], what: str) -> Callable[..., Any]:
    path = registry.get(name, name)
    module, _, attribute = path.rpartition(".")
    if not module:
        raise ConfigError(f"{what} is '{name}', which is no import path; the names known are: {', '.join(registry)}.")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{what} is '{name}', which cannot be imported: {error}.") from error


def _importable(path: str) -> bool:
    root = path.partition(".")[0]
    return "." in path and root.isidentifier() and find_spec(root) is not None


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_KEYWORD,
        parameter.VAR_POSITIONAL,
    )


def _make(maker: Any, given: dict[str, Any], defaults: dict[str, Any]) -> Any:
    try:
        parameters = inspect.signature(maker).parameters
    except ValueError:  # one that is written in C
        parameters = {}
    taken = {name: value for name, value in defaults.items() if name in parameters and name not in given}
    return maker(**given, **taken)


def part(kind: str, spec: Any) -> Any:
    """A part of the trainer as it may have been described; what describes none stays, and the trainer refuses it."""
    if isinstance(spec, str) and spec not in REGISTRY and not _importable(spec):
        return spec
    if isinstance(spec, type) and any(_is_needed(p) for p in inspect.signature(spec).parameters.values()):
        return spec
    if kind == "adapter":
        from agentlightning.adapter import TracerTraceToTriplet

        return build_component(spec, spec_name=kind, dict_requires_type=False, dict_default_cls=TracerTraceToTriplet)
    return build_component(spec, spec_name=kind)
