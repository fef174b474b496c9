"""Scripts end in words: an uncaught error of this package is printed as its message, with exit status 1.

The command line and notebooks do the same by themselves (`cli`, `errors.in_words`). Other errors are shown as Python
shows them, and `AGL_DEBUG=1` shows ours so too.
"""

from __future__ import annotations

import sys
from dataclasses import FrozenInstanceError
from typing import TYPE_CHECKING

from agentlightning.errors import AgentLightningError, debugging, in_words

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def end_scripts_in_words() -> None:
    """Stand before whatever shows uncaught errors now."""
    sys.excepthook = _in_words_or(sys.excepthook)


def _in_words_or(otherwise: Hook) -> Hook:
    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, AgentLightningError) and not debugging():
            from agentlightning.console import safe

            print(safe(in_words(error)), file=sys.stderr)  # noqa: T201
        else:
            if (note := _note_on(error)) is not None:
                error.add_note(note)
            otherwise(kind, error, trace)

    return show


def _note_on(error: BaseException) -> str | None:
    """What mends an error of Python's own, where that is known."""
    if isinstance(error, ValueError) and "a coroutine was expected, got RunResult" in str(error):
        return "fit() is no coroutine, and it had ended by then. Leave asyncio.run out, or run trainer.fit_async(…)."
    if isinstance(error, FrozenInstanceError):
        return "Settings are not changed afterwards: give them when the object is made, such as GRPO(model=…, steps=5)."
    if isinstance(error, ImportError) and error.name and error.path and _hides_another(error.name, error.path):
        return f"{error.path} is a file of yours, and hides the package {error.name!r}: give the file another name."
    return None


def _hides_another(module: str, file: str) -> bool:
    """Whether a file in the script's folder, the first of the path, has the name of a module that is installed."""
    from importlib.machinery import PathFinder
    from pathlib import Path

    folder = Path(sys.path[0] or ".").resolve()
    others = [place for place in sys.path[1:] if Path(place or ".").resolve() != folder]
    return Path(file).resolve().parent == folder and PathFinder.find_spec(module, others) is not None
