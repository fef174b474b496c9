"""What stands beside a setting in `Annotated[…]`: the bounds of a number, and what the setting needs to play a part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from os import PathLike
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le

from agentlightning.algorithm.records import Record, records_of, value_of, written
from agentlightning.arguments import Needs
from agentlightning.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Setting:
    """What the annotations of a setting say of it."""

    type: Any
    default: Any
    bounds: Sequence[Ge | Gt | Le] = ()
    needs: Needs | None = None


@cache
def settings_of(kind: type[Any]) -> dict[str, Setting]:
    """The settings of an algorithm, or of a part, by name, those of records by their flat names. Where a class gives a
    setting another default, what the one below it says of bounds stays."""
    plain = get_type_hints(kind)
    records = records_of(kind)
    hints = [get_type_hints(base, include_extras=True) for base in kind.__mro__ if is_dataclass(base)]
    found: dict[str, Setting] = {}
    for f in fields(kind):
        if f.name in records:
            found |= _of_record(f.name, records[f.name])
            continue
        metadata = next((m for one in hints if (m := _metadata(one.get(f.name)))), [])
        bounds = [m for m in metadata if isinstance(m, Ge | Gt | Le)]
        needs = next((m for m in metadata if isinstance(m, Needs)), None)
        found[f.name] = Setting(plain[f.name], f.default, bounds, needs)
    return found


def _of_record(name: str, record: Record) -> dict[str, Setting]:
    """By their flat names, or, where they have none, as `kl.coef`."""
    flat = record.as_flat(name)
    return {
        flat.get(own, f"{name}.{own}"): replace(setting, default=getattr(record, own))
        for own, setting in settings_of(type(record)).items()
    }


def _metadata(hint: Any) -> list[Any]:
    """What stands beside a type in `Annotated`, and beside those of a union."""
    own = [*hint.__metadata__] if hasattr(hint, "__metadata__") else []
    inner = get_args(hint)[:1] if own else get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    return [*own, *(m for one in inner for m in _metadata(one))]


_KINDS = {str: (str | PathLike, "a text"), bool: (bool, "True or False")}
"""By the type of a setting: what is one, and what it is called."""


def refuse_other_kinds(settings: Any, of: str = "") -> None:
    """Raises ConfigError for the first setting that is no text or no switch, where it must be. `of`: whose it is."""
    for name, setting in settings_of(type(settings)).items():
        union = get_origin(setting.type) in (Union, UnionType)
        kinds = {*get_args(setting.type)} if union else {setting.type}
        value = value_of(settings, name)
        for kind, (types, called) in _KINDS.items():
            wanted = kinds == {kind} or (kinds == {kind, type(None)} and value is not None)
            if wanted and not isinstance(value, types):
                raise ConfigError(f"{written(settings, name)}{of} is {value!r}; it must be {called}.")


def refuse_out_of_bounds(settings: Any, of: str = "") -> None:
    """Raises ConfigError for the first setting that is no number, or outside its bounds. `of`: whose it is."""
    for name, setting in settings_of(type(settings)).items():
        value = value_of(settings, name)
        if setting.bounds and not (value is None and type(None) in get_args(setting.type)):
            _check(written(settings, name) + of, value, setting)


def refuse_unused(settings: Any) -> None:
    """Raises ConfigError for the first setting that was changed and plays no part."""
    for name, setting in settings_of(type(settings)).items():
        needs, value = setting.needs, value_of(settings, name)
        if needs is not None and value != setting.default and not needs.used(settings):
            given = f"{written(settings, name)}={value!r}"
            raise ConfigError(f"{given} has no effect here: it needs {needs.words}. Leave it out otherwise.")


def _check(name: str, value: Any, setting: Setting) -> None:
    whole = int in (setting.type, *get_args(setting.type)) and float not in get_args(setting.type)
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if whole and number != int(number if math.isfinite(number) else 0):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number.")
    if not math.isfinite(number) or not all(_within(number, bound) for bound in setting.bounds):
        said = " and ".join(_words(bound, whole=whole) for bound in setting.bounds)
        unset = " (or None)" if setting.default is None else ""
        raise ConfigError(f"{name} is {value!r}; it must be a number {said}{unset}.")


def _within(number: float, bound: Ge | Gt | Le) -> bool:
    match bound:
        case Ge():
            return number >= bound.ge  # pyright: ignore[reportOperatorIssue]
        case Gt():
            return number > bound.gt  # pyright: ignore[reportOperatorIssue]
        case Le():
            return number <= bound.le  # pyright: ignore[reportOperatorIssue]


def _words(bound: Ge | Gt | Le, *, whole: bool) -> str:
    match bound:
        case Ge():
            return f"at least {bound.ge:g}"
        case Gt():
            return "at least 1" if whole and bound.gt == 0 else f"above {bound.gt:g}"
        case Le():
            return f"at most {bound.le:g}"
