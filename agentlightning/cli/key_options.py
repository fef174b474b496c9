"""Keys on a command line: all options that take one are made here, and read it from a file too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from agentlightning.console import terminal
from agentlightning.errors import ConfigError
from agentlightning.files import reason_of_file

_FROM_A_FILE = "@FILE reads it from a file."


def key_option(variable: str, words: str) -> Any:
    """An option for a key: its text, `@FILE`, or the environment variable."""
    return typer.Option(envvar=variable, help=f"{words} {_FROM_A_FILE}", callback=_key)


def _key(context: typer.Context, parameter: typer.CallbackParam, value: str | None) -> str | None:
    source = context.get_parameter_source(str(parameter.name))
    typed = source is not None and source.name == "COMMANDLINE"  # typer has a click of its own
    if not value or not typed:
        return value
    option = parameter.opts[0]
    if value.startswith("@"):
        return _read(Path(value[1:]), option)
    _warn(context, option, str(parameter.envvar))
    return value


def _read(path: Path, option: str) -> str:
    """What the file holds but for the end of its line. An empty one is an empty key, which is refused as such."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{option} @{path} cannot be read: {reason_of_file(error)}. Name a file that holds the key."
        ) from error


def _warn(context: typer.Context, option: str, variable: str) -> None:
    """Once for a command, however many keys it was given."""
    meta = context.find_root().meta
    if not meta.setdefault(__name__, False):
        meta[__name__] = True
        seen = f"Others on this machine can read {option} in the list of processes."
        terminal(stderr=True).print(f"{seen} Give {option} @FILE, or set {variable}.")
