"""Recognises code that was written for another version of a package than the installed one, from the error it raised.

It looks at an error's objects only. What it is not: a table of versions.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import packages_distributions, version
from types import ModuleType

from agentlightning.installation import NAME

_TAKES_NO = re.compile(r"^(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'")
_SHOWN = 8
"""How many of the names that exist are listed where the one asked for does not."""


@lru_cache(maxsize=64)
def installed_as(module: str | None) -> str:
    """What an imported module is installed as, with its version; nothing of Python's, the user's and this package's."""
    package = (module or "").partition(".")[0]
    names = sorted(packages_distributions().get(package, ()), key=lambda name: name.replace("-", "_") != package)
    return f"{names[0]} {version(names[0])}" if names and package != NAME else ""


def other_version(error: BaseException) -> str | None:
    """The words for a name that an installed package lacks; None for other errors."""
    if isinstance(error, AttributeError) and error.obj is not None:
        if isinstance(error.obj, ModuleType):
            return _without(error.obj.__name__, "", "", ())
        parts = getattr(error.obj, "__dict__", ())
        return _without(type(error.obj).__module__, str(error.name), "its parts are ", parts)
    if isinstance(error, ImportError) and not isinstance(error, ModuleNotFoundError):
        return _without(error.name, "", "", ())
    if isinstance(error, TypeError) and (refused := _TAKES_NO.search(str(error))) and (tb := error.__traceback__):
        while tb.tb_next is not None:
            tb = tb.tb_next
        called = {**tb.tb_frame.f_globals, **tb.tb_frame.f_locals}.get(refused[1])
        if callable(called):
            return _without(called.__module__, refused[2], "it takes ", inspect.signature(called).parameters)
    return None


def _without(module: str | None, name: str, there: str, names: Iterable[str]) -> str | None:
    if not (found := installed_as(module)):
        return None
    known = [each for each in names if not each.startswith("_")]
    nearest = dict.fromkeys([*difflib.get_close_matches(name, known, n=3), *known])
    has = f": {there}{', '.join([*nearest][:_SHOWN])}" if there and known else ""
    return (
        f"{found} is installed here, and has no such name{has}. Write it as that version does, or install the version "
        "that the code was written for."
    )
