"""The `agl` command. Prints; everything else is done elsewhere."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Sequence

from agentlightning.errors import AgentLightningError, debugging, in_words, message_of, of_the_machine


def main() -> None:
    """Entry point: errors made for the user end in one message, without a traceback, and for `--json` in an object with
    the error's code; Ctrl-C ends with status 130."""
    from agentlightning.cli.app import app
    from agentlightning.cli.interrupt import INTERRUPTED, was_interrupted
    from agentlightning.console import Console, TerminalLog, never_fail_to_print, safe
    from agentlightning.trainer.left_running import say_who_is_left
    from agentlightning.variables import new_warnings

    never_fail_to_print()
    logging.basicConfig(level=logging.WARNING, handlers=[TerminalLog()])
    for words in new_warnings():
        Console(stderr=True, highlight=False, soft_wrap=True).print(words, style="yellow", markup=False)
    try:
        app()
    except AgentLightningError as error:
        if debugging():
            raise
        Console(stderr=True, highlight=False, soft_wrap=True).print(in_words(error), style="red", markup=False)
        if _wants_json(sys.argv[1:]):
            shown = {"code": error.code, "message": message_of(error)}
            sys.stdout.write(json.dumps({"error": shown}) + "\n")
        sys.exit(1)
    except Exception as error:  # a bug, in words that may be others'; or something about the user's files
        words = None if debugging() else of_the_machine(error)
        sys.stderr.write(safe(f"Error: {words}\n" if words else traceback.format_exc()))
        sys.exit(1)
    except SystemExit as end:
        if not end.code and was_interrupted():
            sys.exit(INTERRUPTED)
        raise
    finally:
        say_who_is_left()


def _wants_json(arguments: Sequence[str]) -> bool:
    """Whether `--json` is among the options of the command; what follows `--` belongs to a program."""
    return "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)
