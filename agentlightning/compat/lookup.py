"""What an old name means today: from its line in the table to the object."""

from __future__ import annotations

import functools
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from agentlightning.compat.notice import use
from agentlightning.compat.row import Old
from agentlightning.compat.table import BY_NAME
from agentlightning.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]


class NotKept(ConfigError, ImportError):
    """An old name that leads nowhere; the message says why, and what to do instead."""


class NoSuchName(ConfigError, AttributeError):
    """The same where it is asked for and not imported, so that `hasattr` says that it is not there."""


def resolve(module: str, name: str) -> Any:
    """What an old name of a module means today.

    Raises AttributeError for one that the table does not know, and NotKept for one that is not kept.
    """
    old = BY_NAME.get(f"{module}:{name}")
    if old is None and module == "agentlightning" and (words := of_others(module, name)) is not None:
        raise NoSuchName(words)
    if old is None:
        raise AttributeError(f"module '{module}' has no attribute '{name}'{meant(module, name)}")
    if old.to is None and hasattr(sys.modules.get(module), "__path__"):
        raise NoSuchName(why_not(old))  # an import looks for a module of this name next, and hears of it there
    value = follow(old)
    use(old)
    return value


def of_others(module: str, name: str) -> str | None:
    """The words for a name that other libraries have and the package lacks; None for any other."""
    if module.partition(".")[0] != "agentlightning":
        return None
    from agentlightning.compat.other_libraries import written_here  # seldom needed

    hint = written_here(name, set(sys.modules["agentlightning"].__all__))
    return hint and f"There is no {module}.{name}. {hint}"


def why_not(old: Old) -> str:
    """The words for a name that is not kept."""
    return f"{old.name.replace(':', '.')}: {old.note}"


def meant(module: str, name: str) -> str:
    """The name of the module that is near, as a question behind a sentence; nothing where there is none."""
    from difflib import get_close_matches  # slow to load, and seldom needed

    if name in (there := dir(sys.modules.get(module))):  # it could not be loaded, which is said elsewhere
        return ""
    place = None if module != "agentlightning" and name in sys.modules["agentlightning"].__all__ else _part_with(name)
    if place and place != module:
        return f". It is in {place}: from {place} import {name}"
    if module != "agentlightning" and name in sys.modules["agentlightning"].__all__:
        return f". It is in agentlightning: from agentlightning import {name}"
    outer = () if module == "agentlightning" else sys.modules["agentlightning"].__all__
    known = {n.lower(): n for n in (*outer, *there) if not n.startswith("_")}
    near = get_close_matches(name.lower(), known, n=1) if not name.startswith("_") else []
    return f". Did you mean: '{known[near[0]]}'?" if near else ""


def _part_with(name: str) -> str | None:
    """The part of the package that has this very name, by the stubs and what the logging page imports."""
    for file in sorted([*_PACKAGE.glob("*/__init__.pyi"), _PACKAGE / "metrics" / "trackers.py"]):
        if re.search(rf"(\bas |^class ){re.escape(name)}\b", file.read_text(encoding="utf-8"), re.MULTILINE):
            parts = file.relative_to(_PACKAGE).with_suffix("").parts
            return ".".join(["agentlightning", *(part for part in parts if part != "__init__")])
    return None


def follow(old: Old) -> Any:
    """The object that a line of the table leads to."""
    if old.to is None:
        raise NotKept(why_not(old))
    module, _, path = old.to.partition(":")
    return functools.reduce(getattr, filter(None, path.split(".")), import_module(module))
