"""Code is named by scripts and command lines. What a run's folder or a file of settings names is asked about first.

Who owns such a file, and where it lies, says nothing of who wrote it: a run that was sent or downloaded looks like one
that was made here. So there is one rule, without exceptions: `--trust`, or name the code again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentlightning.errors import ConfigError
from agentlightning.learner.catalog import LOSSES

_PROGRAMS = ("command", "args", "env", "runtime_env", "vllm")
"""Options of backends that say which program is started, or how."""


def code_in(settings: Mapping[str, Any]) -> list[str]:
    """The settings whose values would be imported or run, each as NAME=VALUE."""
    found = [("loss", settings.get("loss")), ("renderer", settings.get("renderer"))]
    code = [
        f"{name}={value}" for name, value in found if value is not None and value not in LOSSES and ":" in f"{value}"
    ]
    options = settings.get("backend_options")
    if isinstance(options, Mapping):
        code += [f"backend_options: {name}={options[name]}" for name in _PROGRAMS if options.get(name)]
    return code


def require_trust(source: Path, code: Sequence[str], *, trust: bool) -> None:
    """Raises ConfigError, with what would be imported and how to allow it, where a file names code and nobody has
    vouched for it."""
    if code and not trust:
        raise ConfigError(
            f"{source} names code that would be imported and run: {'; '.join(code)}. Look at it, and say --trust; or "
            "name it yourself on the command line."
        )
