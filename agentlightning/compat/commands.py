"""`lightning_cli`: classes made from the command line's arguments."""

from __future__ import annotations

import argparse
import inspect
import json
from typing import Any

from agentlightning.compat.older_arguments import ARGUMENTS


def lightning_cli(*classes: type) -> Any:
    """An object of each class, from `--class-name.argument value` (or `--argument value` where that is clear).

    Values are read as JSON where they are JSON, else as text. One class gives one object, several a tuple.
    """
    parser = argparse.ArgumentParser()
    places: dict[str, list[tuple[int, str]]] = {}
    for number, cls in enumerate(classes):
        for name in _words_of(cls):
            for option in (f"{cls.__name__.lower()}.{name}", name):
                places.setdefault(option, []).append((number, name))
    for option in places:
        parser.add_argument(f"--{option.replace('_', '-')}", f"--{option}", dest=option, default=None, type=_value)
    given = {option: value for option, value in vars(parser.parse_args()).items() if value is not None}
    arguments: list[dict[str, Any]] = [{} for _ in classes]
    for option, value in given.items():
        if len(places[option]) > 1:
            choices = ", ".join(f"--{classes[n].__name__.lower()}.{name}" for n, name in places[option])
            parser.error(f"--{option} is an argument of several classes; write one of: {choices}")
        number, name = places[option][0]
        arguments[number][name] = value
    made = tuple(cls(**found) for cls, found in zip(classes, arguments, strict=True))
    return made[0] if len(made) == 1 else made


def _words_of(cls: type) -> list[str]:
    """The arguments of a class, older ones too."""
    parameters = inspect.signature(cls).parameters.values()
    today = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    older = [old.name.rpartition("(")[2].removesuffix("=)") for old in ARGUMENTS if f":{cls.__name__}(" in old.name]
    return list(dict.fromkeys([*today, *older]))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
