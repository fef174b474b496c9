"""Environment variables by their names, and how they were read."""

from __future__ import annotations

import os
from enum import StrEnum


class LightningEnvVar(StrEnum):
    """The variables that were documented. AGL_EMITTER_DEBUG has no meaning any more: the log level decides."""

    AGL_EMITTER_DEBUG = "AGL_EMITTER_DEBUG"
    AGL_MANAGED_STORE = "AGL_MANAGED_STORE"
    AGL_CURRENT_ROLE = "AGL_CURRENT_ROLE"
    AGL_SERVER_HOST = "AGL_SERVER_HOST"
    AGL_SERVER_PORT = "AGL_SERVER_PORT"


_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def resolve_bool_env_var(
    env_var: LightningEnvVar | str, override: bool | None = None, fallback: bool | None = None
) -> bool | None:
    """What is given, else what the environment says, else `fallback`. Raises ValueError for what is no yes or no."""
    text = _text(env_var)
    if override is not None or text is None:
        return fallback if override is None else override
    if text.lower() in _TRUE or text.lower() in _FALSE:
        return text.lower() in _TRUE
    raise ValueError(f"{_name(env_var)} is '{text}'; it can be one of {', '.join([*_TRUE, *_FALSE])}.")


def resolve_int_env_var(
    env_var: LightningEnvVar | str, override: int | None = None, fallback: int | None = None
) -> int | None:
    """The variable as a whole number."""
    text = _text(env_var)
    if override is not None or text is None:
        return fallback if override is None else override
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{_name(env_var)} is '{text}', which is no whole number.") from None


def resolve_str_env_var(
    env_var: LightningEnvVar | str, override: str | None = None, fallback: str | None = None
) -> str | None:
    """The variable as text."""
    text = _text(env_var)
    if override is not None:
        return override
    return fallback if text is None else text


def _name(env_var: LightningEnvVar | str) -> str:
    return env_var.value if isinstance(env_var, LightningEnvVar) else env_var


def _text(env_var: LightningEnvVar | str) -> str | None:
    return os.environ.get(_name(env_var))
