"""Scripts end in words: an uncaught error of this package is printed as its message, with exit status 1; so is
one that ends a thread of the script, whose other threads go on.

The command line and notebooks do the same by themselves (`cli`, `errors.in_words`). Other errors are shown as Python
shows them, and `AGL_DEBUG=1` shows ours so too.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from agentlightning.errors import (
    AgentLightningError,
    came_from_here,
    debugging,
    in_words,
    message_of,
    of_the_machine,
    own_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def end_scripts_in_words() -> None:
    """Stand before whatever shows uncaught errors now."""
    open_standard_streams()
    sys.excepthook = _in_words_or(sys.excepthook)
    otherwise = threading.excepthook

    def show(happened: threading.ExceptHookArgs) -> None:
        if isinstance(happened.exc_value, AgentLightningError):
            sys.excepthook(happened.exc_type, happened.exc_value, happened.exc_traceback)
        else:
            otherwise(happened)

    threading.excepthook = show


def _in_words_or(otherwise: Hook) -> Hook:
    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if (words := _in_words(error)) and not debugging():
            from agentlightning.console import safe

            print(safe(words), file=sys.stderr)  # noqa: T201
        else:
            if (note := _note_on(error)) is not None:
                error.add_note(note)
            otherwise(kind, error, trace)

    return show


def _in_words(error: BaseException) -> str | None:
    """What is printed in place of a traceback; None where Python's own is shown."""
    if isinstance(error, AgentLightningError):
        return in_words(error)
    if isinstance(error, KeyboardInterrupt):
        return str(error) or None
    words = of_the_machine(error) if isinstance(error, OSError) and came_from_here(error) else None
    return words and f"Error: {words}"


def open_standard_streams() -> None:
    """Give a process that was started without one of its standard streams (`<&-`, some daemons) an empty one: else the
    next file that is opened takes its number, and is written to by whatever prints, or closed by an event loop."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - it stays open


_ROWS = (
    "result.metrics has a row per step, each a dict. The last reward: result.metrics[-1]['reward']; all of them: "
    "[row.get('reward') for row in result.metrics]."
)
_MODEL = (
    "Its model is in the folder model: AutoModelForCausalLM.from_pretrained(result.checkpoint / 'model'), or "
    "agl export RUN --to FOLDER."
)
_NOTES = {
    r"\bMetricRows?\b(?!.*: row\[)|values to unpack[^\n]*\n.*\.metrics": _ROWS,
    r"not RunResult\n.*from_pretrained\(": f"RunResult is what fit() returns. {_MODEL}",
    r"\bRunResult\b(?!.* no )": f"RunResult is what fit() returns: run_dir, checkpoint, stopped and metrics. {_ROWS}",
    r"^Extra data: line 2 column 1|^Trailing data": "If the file has a JSON value per line (.jsonl), read it by lines: "
    "[json.loads(line) for line in file]; with pandas, read_json(file, lines=True).",
    r"[Ii]s a directory: '.*[/\\]step-\d+'|'(Posix|Windows)Path' object.*\n.*\bcheckpoint\b|"
    r"\n.*from_pretrained\(.*\.(run_dir|checkpoint)\)": f"result.checkpoint is a folder. {_MODEL}",
    r"type\(s\) for \+: '(Posix|Windows)Path'": "Paths are joined by /: result.run_dir / 'metrics.jsonl'.",
    r"^Object of type (Posix|Windows)Path is not JSON": "json.dumps(…, default=str) writes paths as texts.",
}
"""Python's words for a mistake with what this package gives, with the user's line below, and what mends it."""


def _note_on(error: BaseException) -> str | None:
    """What mends an error of Python's own, where that is known."""
    if isinstance(error, ValueError) and "a coroutine was expected, got RunResult" in str(error):
        return "fit() is no coroutine, and it had ended by then. Leave asyncio.run out, or run trainer.fit_async(…)."
    run = re.search(r"Unrecognized model in (.+)\. Should have a `model_type`", str(error))
    if run and any((Path(run[1]) / name).is_file() for name in ("run.json", "checkpoint.json")):
        return f"This is the folder of a run or a checkpoint. {_MODEL}"
    if isinstance(error, FrozenInstanceError):
        return "This object stays as it was made. Settings are given when it is made, such as GRPO(model=…, steps=5)."
    if isinstance(error, ImportError | AttributeError):
        for module, file in _concerned(error):
            if _hides_another(module, file):
                return f"{file} is a file of yours, and hides the package {module!r}: give the file another name."
    about = f"{message_of(error)}\n{own_text(error)}"
    return next((note for words, note in _NOTES.items() if re.search(words, about)), None)


def _concerned(error: ImportError | AttributeError) -> Iterator[tuple[str, str]]:
    """The module that lacks a name, and those whose import led there, with their files."""
    about = [vars(error.obj)] if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType) else []
    if isinstance(error, ImportError):
        about.append({"__name__": error.name, "__file__": error.path})
        top = sys.modules.get((error.name or "").partition(".")[0])  # of a part of what is no package
        about += [vars(top)] if top is not None else []
    trace = error.__traceback__
    while trace is not None:
        about.append(trace.tb_frame.f_globals)
        trace = trace.tb_next
    script = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    about.extend(vars(module) for name, module in list(sys.modules.items()) if name and script.endswith(f"{name}.py"))
    for names in about:
        if names.get("__name__") and names.get("__file__"):
            yield names["__name__"], names["__file__"]


def _hides_another(module: str, file: str) -> bool:
    """Whether a file in the script's folder, the first of the path, has the name of a module that is installed."""
    from importlib.machinery import PathFinder
    from pathlib import Path

    folder = Path(sys.path[0] or ".").resolve()
    others = [place for place in sys.path[1:] if Path(place or ".").resolve() != folder]
    return Path(file).resolve().parent == folder and PathFinder.find_spec(module, others) is not None
