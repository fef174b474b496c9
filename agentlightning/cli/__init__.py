"""The `agl` command. Prints; everything else is done elsewhere."""

from __future__ import annotations

import logging
import sys

from agentlightning.errors import AgentLightningError, debugging, in_words


def main() -> None:
    """Entry point: errors made for the user end in one message, without a traceback; Ctrl-C ends with status 130."""
    from rich.console import Console

    from agentlightning.cli.app import app
    from agentlightning.cli.interrupt import INTERRUPTED, was_interrupted

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except AgentLightningError as error:
        if debugging():
            raise
        Console(stderr=True, highlight=False, soft_wrap=True).print(in_words(error), style="red", markup=False)
        sys.exit(1)
    except SystemExit as end:
        if not end.code and was_interrupted():
            sys.exit(INTERRUPTED)
        raise
