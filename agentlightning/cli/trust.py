"""Code is named by scripts and command lines. What a run's folder or a file of settings names is asked about first.

Who owns such a file, and where it lies, says nothing of who wrote it: a run that was sent or downloaded looks like one
that was made here. So there is one rule, without exceptions: `--trust`, or name the code again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentlightning.errors import ConfigError
from agentlightning.learner.catalog import LOSSES

_PROGRAMS = ("command", "args", "env", "runtime_env", "vllm")
"""Options of backends that say which program is started, or how."""


def code_in(settings: Mapping[str, Any]) -> list[str]:
    """The settings whose values would be imported or run, or get a key, each as NAME=VALUE."""
    found = [("loss", settings.get("loss")), ("renderer", settings.get("renderer"))]
    code = [f"{name}={value}" for name, value in found if str(value) not in LOSSES and ":" in str(value)]
    options = settings.get("backend_options")
    if isinstance(options, Mapping):
        code += [f"backend_options: {name}={options[name]}" for name in _PROGRAMS if options.get(name)]
    return [*code, *_addresses_in(settings)]


def _addresses_in(settings: Mapping[str, Any]) -> list[str]:
    """The addresses that a key of this environment would be sent to."""
    teacher, judge = settings.get("teacher"), settings.get("group_judge")
    found = [
        ("teacher_url", settings.get("teacher_url"), "AGL_TEACHER_KEY"),
        ("teacher.url", teacher.get("url") if isinstance(teacher, Mapping) else None, "AGL_TEACHER_KEY"),
        ("group_judge.base_url", judge.get("base_url") if isinstance(judge, Mapping) else None, "AGL_JUDGE_KEY"),
    ]
    return [f"{name}={url} (it gets your {key})" for name, url, key in found if url and os.environ.get(key)]


def require_trust(source: Path, code: Sequence[str], *, trust: bool) -> None:
    """Raises ConfigError, with what would be imported or given a key and how to allow it, where a file names it and
    nobody has vouched for it."""
    if code and not trust:
        raise ConfigError(
            f"{source} names what would be imported, run or given a key: {'; '.join(code)}. Look at it, and say "
            "--trust; or name it yourself on the command line."
        )
