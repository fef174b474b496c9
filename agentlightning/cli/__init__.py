"""The `agl` command. Prints; everything else is done elsewhere."""

from __future__ import annotations

import errno
import json
import logging
import sys
import traceback
from collections.abc import Sequence

from agentlightning.errors import AgentLightningError, debugging, in_words, message_of

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OF_PATHS = (errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)
_MAKE_SPACE = (
    "Make room on the disk and type the command again; a training goes on with --resume from its last checkpoint."
)


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
        sys.stderr.write(safe(_of_files(error) or traceback.format_exc()))
        sys.exit(1)
    except SystemExit as end:
        if not end.code and was_interrupted():
            sys.exit(INTERRUPTED)
        raise
    finally:
        say_who_is_left()


def _of_files(error: Exception) -> str | None:
    """The words for a full disk or a path that cannot be used; None for another error."""
    if not isinstance(error, OSError) or debugging():
        return None
    what = f"'{error.filename}'" if error.filename else "A file"
    if error.errno in _FULL:
        return f"Error: {what} could not be written: {error.strerror}. {_MAKE_SPACE}\n"
    if error.errno == errno.EROFS:
        return f"Error: {what} could not be written: {error.strerror}. Give a folder that can be written.\n"
    if error.errno in _OF_PATHS and error.filename:
        return f"Error: {what} cannot be used: {error.strerror}. (AGL_DEBUG=1 shows the whole way.)\n"
    return None


def _wants_json(arguments: Sequence[str]) -> bool:
    """Whether `--json` is among the options of the command; what follows `--` belongs to a program."""
    return "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)
