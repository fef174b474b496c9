"""A command is a record: its fields are its options, its docstring is its help, and `work` names what it does.

A field that is a record of its own (`Options`) stands for the options in it, in its place. What a command does is in a
module of its own, imported when it runs, so that a page of help loads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from importlib import import_module
from inspect import Parameter, Signature
from typing import Any, ClassVar, get_type_hints

import typer


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that several commands have. Their names are those of its fields, unless an option says another."""


@dataclass(frozen=True, kw_only=True)
class Command(Options):
    """A command of `agl`, and how it was called."""

    command: ClassVar[str]
    """What people type."""
    work: ClassVar[str]
    """Where what it does is: "module:function", which is called with the record. What it returns is the exit status;
    None and False are success."""
    epilog: ClassVar[str | None] = None
    """Help that stands below the options."""


def add(app: typer.Typer, kind: type[Command], panel: str | None) -> None:
    """Let the application have the command, in a panel of its help."""

    def called(**given: Any) -> None:
        options = _made(kind, given)
        module, _, function = options.work.partition(":")
        if status := getattr(import_module(module), function)(options):
            raise typer.Exit(int(status))

    parameters = list(_parameters(kind))
    vars(called)["__signature__"] = Signature(parameters)
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    called.__name__, called.__doc__ = kind.command.replace("-", "_"), kind.__doc__
    app.command(kind.command, epilog=kind.epilog, rich_help_panel=panel)(called)


def _parameters(kind: type[Options]) -> Iterator[Parameter]:
    """The options as parameters of a function, which typer reads."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if (group := _group(hints[field.name])) is not None:
            yield from _parameters(group)
            continue
        default = Parameter.empty if (value := _default(field)) is MISSING else value
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name])


def _made(kind: type[Any], given: Mapping[str, Any]) -> Any:
    """The record of what was given, with the records in it."""
    hints = get_type_hints(kind)
    groups = {f.name: _made(group, given) for f in fields(kind) if (group := _group(hints[f.name])) is not None}
    return kind(**groups, **{f.name: given[f.name] for f in fields(kind) if f.name not in groups})


def _group(hint: Any) -> type[Options] | None:
    return hint if isinstance(hint, type) and issubclass(hint, Options) else None


def _default(field: Field[Any]) -> Any:
    factory: Callable[[], Any] | Any = field.default_factory
    return field.default if factory is MISSING else factory()
