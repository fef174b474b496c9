"""A command is a record: its fields are its options, its docstring is its help, and `work` names what it does.

A field that is a record of its own (`Options`) stands for the options in it, in its place. What a command does is in a
module of its own, imported when it runs, so that a page of help loads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from importlib import import_module
from inspect import Parameter, Signature
from typing import Any, ClassVar, get_type_hints

import typer
from typer.core import TyperCommand

from agentlightning.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that several commands have. Their names are those of its fields, unless an option says another."""

    goes_with: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Options that have an effect only beside one of some others, by the names of the fields."""


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
    repeats_names: ClassVar[bool] = False
    """Whether an option that takes NAME=VALUE may be given twice for the same name."""


class _EachOnce(TyperCommand):
    """A command that refuses an option given twice, where only the last would count, and one with an empty text."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        raw, _, order = self.make_parser(ctx).parse_args(args=[*args]) if args else ({}, [], [])
        if empty := next((one for one in order if "" in _texts(raw.get(one.name))), None):
            shown = empty.opts[0] if empty.opts[0].startswith("-") else empty.name.upper()
            raise ConfigError(f"{shown} is empty: is a variable not set? Give a value, or leave it out.")
        for one in order:
            a_value = one.opts[0].startswith("-") and not getattr(one, "is_flag", False) and not one.multiple
            if a_value and order.count(one) > 1:
                raise ConfigError(f"{one.opts[0]} is given twice: leave one out.")
        return super().parse_args(ctx, args)


def _texts(given: object) -> Sequence[object]:
    """What was typed for an option, each time that it was given."""
    return given if isinstance(given, list | tuple) else (given,)


def add(app: typer.Typer, kind: type[Command], panel: str | None) -> None:
    """Let the application have the command, in a panel of its help."""

    def called(invocation: typer.Context, **given: Any) -> None:
        _check(kind, given, invocation)
        options = _made(kind, given)
        module, _, function = options.work.partition(":")
        if status := getattr(import_module(module), function)(options):
            raise typer.Exit(int(status))

    invocation = Parameter("invocation", Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [invocation, *_parameters(kind)]
    vars(called)["__signature__"] = Signature(parameters)
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    called.__name__, called.__doc__ = kind.command.replace("-", "_"), kind.__doc__
    app.command(kind.command, cls=_EachOnce, epilog=kind.epilog, rich_help_panel=panel)(called)


def _check(kind: type[Command], given: Mapping[str, Any], invocation: typer.Context) -> None:
    """Raises ConfigError for what was typed and would have no effect."""
    spelled = {str(parameter.name): parameter.opts[0] for parameter in invocation.command.params}
    groups = [group for hint in get_type_hints(kind).values() if (group := _group(hint)) is not None]
    for name, others in [pair for one in (kind, *groups) for pair in one.goes_with.items()]:
        source = invocation.get_parameter_source(name)
        typed = source is not None and source.name == "COMMANDLINE"  # a key may be in the environment for others
        if typed and not any(given[other] for other in others):
            raise ConfigError(
                f"{spelled[name]} has no effect: it is for {' or '.join(spelled[one] for one in others)}. Give "
                f"{'that' if len(others) == 1 else 'one of them'}, too, or leave it out."
            )
    for name, values in given.items():
        several = isinstance(values, list) and spelled[name].startswith("--")
        named = [value.partition("=")[0] for value in values if "=" in value] if several else []
        twice = next((one for one in named if named.count(one) > 1), None)
        if twice is not None and not kind.repeats_names:
            raise ConfigError(f"{spelled[name]} {twice}=… is given twice: leave one out.")


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
