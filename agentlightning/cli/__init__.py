"""The `agl` command. Prints; everything else is done elsewhere."""

from __future__ import annotations

import logging
import sys
import traceback

from agentlightning.errors import AgentLightningError, debugging, in_words


def main() -> None:
    """Entry point: errors made for the user end in one message, without a traceback; Ctrl-C ends with status 130."""
    from agentlightning.cli.app import app
    from agentlightning.cli.interrupt import INTERRUPTED, was_interrupted
    from agentlightning.console import Console, SafeFormatter, never_fail_to_print, safe

    never_fail_to_print()
    log = logging.StreamHandler()
    log.setFormatter(SafeFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[log])
    try:
        app()
    except AgentLightningError as error:
        if debugging():
            raise
        Console(stderr=True, highlight=False, soft_wrap=True).print(in_words(error), style="red", markup=False)
        sys.exit(1)
    except Exception:  # a bug, in words that may be others'
        sys.stderr.write(safe(traceback.format_exc()))
        sys.exit(1)
    except SystemExit as end:
        if not end.code and was_interrupted():
            sys.exit(INTERRUPTED)
        raise
