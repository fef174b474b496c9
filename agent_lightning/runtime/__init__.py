"""Intermediate rewards (AIR) and the switches of older programs.

Tracing needs no switch: every model call that goes to `resource.model_api` is recorded, and tool calls with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentlightning.errors import ConfigError
from agentlightning.runner.air import air
from agentlightning.tracer import OtelTracer

_SETTINGS: dict[str, Any] = {"air_enabled": True, "max_retries": 0, "timeout": None}


def enable_air() -> None:
    """Ask the rules of `air`; they are asked unless `set_config` said otherwise."""
    set_config({"air_enabled": True})


def set_config(config: Mapping[str, Any]) -> None:
    """`air_enabled`; `timeout` of one rollout in seconds; `max_retries` of a rollout that failed.

    Raises ConfigError for anything else.
    """
    unknown = sorted(set(config) - set(_SETTINGS))
    if unknown:
        raise ConfigError(f"set_config does not know {', '.join(unknown)}; it knows {', '.join(_SETTINGS)}.")
    _SETTINGS.update(config)
    air.enabled = bool(_SETTINGS["air_enabled"])


def current_config() -> Mapping[str, Any]:
    """What `set_config` set."""
    return dict(_SETTINGS)


def auto_instrument(
    trace_llm_calls: bool = True, trace_tool_calls: bool = True, trace_context: bool = True
) -> OtelTracer:
    """Begin to collect the spans of instrumented libraries now; the gateway's calls are recorded in any case."""
    tracer = OtelTracer()
    if trace_tool_calls or trace_context or trace_llm_calls:
        tracer.init()
    return tracer


__all__ = ["air", "auto_instrument", "current_config", "enable_air", "set_config"]
