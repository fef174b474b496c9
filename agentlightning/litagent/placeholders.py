"""Commands with places for a task's fields: `{task}`, `{task.prompt}`, `{task.file.name}`. Pure.

What is put in is part of one argument and stays it: no shell reads it, and nothing in it is split or replaced again.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from agentlightning.errors import ConfigError

_PLACE = re.compile(r"\{task(?:\.(\w+(?:\.\w+)*))?\}")
_MEANT = re.compile(r"(?:--?[\w-]+=)?(\{{1,2}\s*[Tt]ask\s*[.\[:].*?\}{1,2})")
"""An argument that is nothing but a field of the task, however it is written."""
_LONGEST = 131_071
"""Bytes of one argument, on Linux."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_EXPANDED = re.compile(r"\$[\w{(]|`")


def has_places(command: Sequence[str]) -> bool:
    """Whether a command takes anything of its task as an argument."""
    return any(_PLACE.search(argument) for argument in command)


def check_shell(command: Sequence[str]) -> None:
    """Raises ConfigError for a command that would have a shell read what is put in."""
    shell = command[0].rpartition("/")[2] in ("sh", "bash", "dash", "zsh", "ksh", "fish")
    for before, argument in pairwise(command):
        if shell and before.startswith("-") and before.endswith("c") and (place := _PLACE.search(argument)):
            raise ConfigError(
                f"A shell would read what a task puts in for {place[0]} as commands. Hand it over as an argument: "
                f"sh -c 'my-agent \"$1\"' sh {place[0]}"
            )


def check_places(command: Sequence[str]) -> None:
    """Raises ConfigError for an argument that is a field of the task in the way of writing of Python or of Jinja."""
    for argument in command:
        meant = _MEANT.fullmatch(argument)
        if meant is not None and _PLACE.fullmatch(meant[1]) is None:
            names = re.findall(r"\w+", meant[1])
            raise ConfigError(
                f"The command has {meant[1]}. A field of the task is {{{'.'.join(['task', *names[1:]])}}} there."
            )


def fill(command: Sequence[str], task: Any) -> list[str]:
    """The command for a task. Raises ConfigError for a field that the task lacks, that no argument can hold, or whose
    name alone stands in braces as a whole argument.
    """
    for argument in command:
        if isinstance(task, Mapping) and argument[:1] + argument[-1:] == "{}" and argument[1:-1] in task:
            raise ConfigError(f"The command has {argument}. A field of the task is {{task.{argument[1:-1]}}} there.")
    return [_PLACE.sub(lambda place: _value(place, task), argument) for argument in command]


def _value(place: re.Match[str], task: Any) -> str:
    found = task
    for name in (place[1] or "").split(".") if place[1] else ():
        if not isinstance(found, Mapping) or name not in found:
            has = f"It has {', '.join(map(str, found))}." if isinstance(found, Mapping) else "It is no object."
            raise ConfigError(f"The command has {place[0]}, and the task has no such field. {has}")
        found = found[name]
    text = found if isinstance(found, str) else json.dumps(found)
    if "\0" in text or len(text.encode("utf-8", "surrogatepass")) > _LONGEST:
        why = "a NUL character in it" if "\0" in text else f"more than {_LONGEST} bytes"
        raise ConfigError(f"{place[0]} cannot be an argument: it has {why}. Let the program read its task from stdin.")
    return text


def split(command: str) -> list[str]:
    """A command in words. Raises ConfigError for what only a shell understands: no shell runs."""
    try:
        words, parts = shlex.split(command), _with_quotes(command)
    except ValueError as error:
        raise ConfigError(f"The command {command!r} cannot be read: {error}. Look at its quotes.") from None
    if words and _ASSIGNMENT.match(words[0]):
        raise ConfigError(
            f"The command begins with a variable, {words[0]!r}, which only a shell understands. "
            f"Give  env {command}  instead."
        )
    for part in parts:
        if set(part) <= set("|&;<>()") or (part[:1] != "'" and _EXPANDED.search(part)):
            raise ConfigError(
                f"The command has {part!r}, which only a shell understands, and no shell runs. "
                f"Give  sh -c {shlex.quote(command)}  if you mean it, or put it in quotes if it is text."
            )
    return words


def _with_quotes(command: str) -> list[str]:
    """The words with their quotes, and what a shell takes for operators."""
    lexer = shlex.shlex(command, posix=False, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    return list(lexer)
