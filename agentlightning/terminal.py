"""Scripts end in words: an uncaught error of this package is printed as its message, with exit status 1.

The command line and notebooks do the same by themselves (`cli`, `errors.in_words`). Other errors are shown as Python
shows them, and `AGL_DEBUG=1` shows ours so too.
"""

from __future__ import annotations

import sys
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
            otherwise(kind, error, trace)

    return show
