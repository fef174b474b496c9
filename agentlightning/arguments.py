"""Arguments that do not exist or are missing, and what was probably meant.

`GivenByName` is for classes whose settings are keyword arguments, `explained` for other functions and methods,
`explained_class` for other classes; they cost nothing where the arguments are right. `of_its_kinds` also looks at what
the arguments are.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
import reprlib
from abc import ABCMeta
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    ParamSpec,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from agentlightning.errors import ConfigError, KindError
from agentlightning.other_names import OTHER_LIBRARIES_NAMES

P = ParamSpec("P")
R = TypeVar("R")

FEW = 30
"""So many names are listed in a message."""
_ALIKE, _NEAR, _SURELY = 0.62, 0.7, 0.845
"""How much of two names must be the same, for one to be a slip of the other; among many; and where other libraries have
settings of that kind."""


class Hints(dict[str, str]):
    """What is said of settings that belong elsewhere, by their names; `get` knows kinds of names, too, by patterns."""

    def __init__(self, kinds: Sequence[tuple[str, str]], named: Mapping[str, str]) -> None:
        super().__init__(named)
        self.kinds = kinds

    def get(self, name: str, default: Any = None) -> Any:
        of_its_kind = (words for pattern, words in self.kinds if re.fullmatch(pattern, name.lower()))
        return self[name] if name in self else next(of_its_kind, default)


class _SignatureOfInit:
    """What `inspect.signature` says of a class, whatever its metaclass takes."""

    def __get__(self, _: object, cls: type) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class _ByName(ABCMeta):
    """Looks at the arguments of a class before it is made. Copies and pickles are not made by a call."""

    if not TYPE_CHECKING:  # type checkers and editors look at `__init__`

        def __call__(cls, *positional: Any, **given: Any) -> Any:
            parameters = sorted(cls.__signature__.parameters.values(), key=lambda p: p.default is not p.empty)
            by_name = all(p.kind is p.KEYWORD_ONLY for p in parameters)
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                taken, known = positional if by_name else (), cls._known([p.name for p in parameters])
                refuse_unknown(cls.__name__, taken, given, known, cls._otherwise, cls._others)
                if by_name:
                    refuse_missing(cls.__name__, given, parameters, cls._needed)
            return super().__call__(*positional, **cls._as_fields(given))

        def __getattr__(cls, name: str) -> Any:
            raise AttributeError(
                f"type object {cls.__name__!r} has no attribute {name!r}.{_hint_of_method(cls, name)}",
                name=name,
                obj=cls,
            )


def _hint_of_method(cls: Any, name: str) -> str:
    """What is written here in place of a method that other libraries have."""
    hints: Mapping[str, str] = {} if name.startswith("_") else cls._method_hints
    return f" {hints[name]}" if name in hints else ""


class GivenByName(metaclass=_ByName):
    """A class whose settings are keyword arguments: an unknown name is refused with the one that was meant."""

    _otherwise: ClassVar[str | None] = None
    """What is said of a name that nothing is near to; None: all names."""
    _others: ClassVar[Collection[str]] = ()
    """Names of settings that belong elsewhere, however near they are to one that is here: as `_otherwise` says, or, in
    a mapping, what is said of each."""
    _needed: ClassVar[Mapping[str, str]] = {}
    """What to give, by the names of settings that have no default."""

    _method_hints: ClassVar[Mapping[str, str]] = {}
    """Where to find methods that people look for here."""

    @classmethod
    def _known(cls, names: Sequence[str]) -> Sequence[str]:
        """The names that are taken: those of its fields, and other spellings of them."""
        return names

    @classmethod
    def _as_fields(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """What was given, by the names of its fields."""
        return given

    if not TYPE_CHECKING:
        __signature__ = _SignatureOfInit()

        def __getattr__(self, name: str) -> Any:
            hint = _hint_of_method(type(self), name)
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}.{hint}", name=name, obj=self
            )


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """The function; a ConfigError tells its callers which argument they meant or forgot."""
    inside, _, name = function.__qualname__.rpartition(".")
    first = next(iter(inspect.signature(function).parameters), None)
    owner = "" if first != "self" or inside.endswith(">") else inside.rpartition(".")[2]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if owner and args and all(kind.__name__ != owner for kind in type(args[0]).__mro__):
            raise ConfigError(f"{name} was called on the class {owner}; call it on an object: {owner}(…).{name}(…).")
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            trace = error.__traceback__
            if trace is not None and trace.tb_next is None:  # nothing of the function has run: the arguments are wrong
                _explain(function, args, kwargs)
            raise

    return call


T = TypeVar("T", bound=type)


def explained_class(cls: T) -> T:
    """The class, whose makers are told by ConfigError which argument they meant or forgot, and of a data class, which
    is of another kind than its field."""
    made: Callable[..., None] = explained(cls.__init__)
    checked = of_its_kinds(made) if hasattr(cls, "__dataclass_fields__") else made
    setattr(cls, "__init__", checked)  # noqa: B010 - a class's own, which checkers do not let be set
    return cls


_CALLED: Mapping[Any, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a text"),
    Path: (Path, "a path"),
    Sequence: (Sequence, "a list"),
    list: (Sequence, "a list"),
    Mapping: (Mapping, "a dict"),
    Callable: (Callable, "a function"),
    BaseException: (BaseException, "an exception"),
}
"""By the kind that a hint names: what is one, and what it is called."""


def of_its_kinds(function: Callable[P, R]) -> Callable[P, R]:
    """The function; a KindError names to its callers an argument of another kind than its hint says."""
    signature = inspect.signature(function)
    parts = function.__qualname__.split(".")
    what = parts[-2] if parts[-1] == "__init__" else parts[-1]
    hints: dict[str, Any] = {}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # which says what is missing or too much
        if not hints:  # only now are all names of its module known
            hints.update(get_type_hints(function))
        check_kinds(what, given, hints)
        return function(*args, **kwargs)

    return call


def check_kinds(what: str, given: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raises KindError for the first value of another kind than its hint says; hints that say more are left alone."""
    for name, value in given.items():
        kinds = _kinds(hints[name]) if name in hints else []
        if not kinds or any(_fits(value, kind) for kind in kinds):
            continue
        named = " or ".join(dict.fromkeys(_called(kind) for kind in kinds if kind is not NoneType))
        unset = " (or None)" if NoneType in kinds else ""
        sentence = f"{name} of {what} is {reprlib.repr(value)}; it must be {named}{unset}."
        raise KindError(sentence + (as_number(value) if {int, float} & {*kinds} else as_plain(value)))


def _kinds(hint: Any) -> Sequence[Any]:
    """The kinds of a hint, one of which a value must be of; none where not all of them are known."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return kinds if all(map(_is_known, kinds)) else ()


def _is_known(kind: Any) -> bool:
    a_record = hasattr(kind, "__dataclass_fields__") or hasattr(kind, "__struct_fields__")
    return a_record or kind in (NoneType, *_CALLED) or get_origin(kind) in _ORIGINS


_ORIGINS = {get_origin(Sequence[int]), get_origin(Mapping[int, int]), get_origin(Callable[..., Any]), list}


def _fits(value: Any, kind: Any) -> bool:
    """Whether it is of the kind, and so is what is in it."""
    if kind is NoneType or value is None:
        return kind is NoneType and value is None
    types, parts = _CALLED.get(get_origin(kind) or kind, (kind, ""))[0], get_args(kind)
    if not isinstance(value, types) or (kind in (int, float) and type(value) is bool):
        return False
    if types is Sequence and isinstance(value, str | bytes):
        return False
    if not parts or types not in (Sequence, Mapping):
        return True
    inner, each = _kinds(parts[-1]), [*value.values()] if isinstance(value, Mapping) else [*value]
    return not inner or all(any(_fits(one, of) for of in inner) for one in each)


def _called(kind: Any) -> str:
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin not in _CALLED:
        return f"agl.{kind.__name__}(…)"
    inner = _kinds(parts[-1]) if parts and origin is not Callable else []
    of = " or ".join(f"{_called(one).removeprefix('a ')}s" for one in inner if one is not NoneType)
    return f"{_CALLED[origin][1]}{f' of {of}' if of else ''}"


def _explain(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises ConfigError if it knows what is wrong with the arguments."""
    parameters = list(inspect.signature(function).parameters.values())
    names = function.__qualname__.split(".")
    what = type(args[0]).__name__ if names[-1] == "__init__" else names[-1]
    otherwise, others = None, {}
    if parameters and parameters[0].name == "self":
        if isinstance(owner := args[0], GivenByName) and names[-1] != "__init__":
            otherwise, others = owner._otherwise, _of_the_object(type(owner))
        parameters, args = parameters[1:], args[1:]
    known = [p.name for p in parameters]
    others = {name: words for name, words in others.items() if nearest(name, known) is None}
    refuse_unknown(what, (), kwargs, known, otherwise, others, noun="argument")
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(by_position):
        if not by_position:
            refuse_unknown(what, args, (), [p.name for p in parameters], None)
        takes = f"{len(by_position)} argument{'s' * (len(by_position) != 1)} without a name ({', '.join(by_position)})"
        raise ConfigError(
            f"{what} was given {len(args)} argument{'s' * (len(args) != 1)} without a name, and takes {takes}."
        )
    refuse_missing(what, {*kwargs, *by_position[: len(args)]}, parameters, {})


def _of_the_object(cls: type[GivenByName]) -> Mapping[str, str]:
    """What is said of a setting of the object that is given to one of its methods."""
    what = cls.__name__
    own = {name: f"It is a setting of {what}: {what}({name}=…)." for name in inspect.signature(cls).parameters}
    return {**own, **(cls._others if isinstance(cls._others, Mapping) else {})}


def refuse_missing(
    what: str, given: Collection[str], parameters: Collection[inspect.Parameter], needed: Mapping[str, str]
) -> None:
    """Raises ConfigError where an argument without a default is not given."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [p.name for p in parameters if p.default is p.empty and p.kind not in variable and p.name not in given]
    if missing:
        shown = ", ".join(f"{name}=…" for name in missing)
        hints = "".join(f" {name} is {needed[name]}." for name in missing if name in needed)
        raise ConfigError(f"{what} needs {' and '.join(missing)}: {what}({shown}).{hints}")


def refuse_unknown(
    what: str,
    positional: Sequence[Any],
    given: Collection[str],
    known: Collection[str],
    otherwise: str | None,
    others: Collection[str] = (),
    *,
    noun: str = "setting",
) -> None:
    """Raises ConfigError for names that are no settings, with those that were probably meant."""
    if positional:
        also = " Agent and tasks go to fit: Trainer(algorithm=…).fit(agent, tasks)." if what == "Trainer" else ""
        raise ConfigError(f"{what} takes its settings by name, for example {what}({next(iter(known))}=…).{also}")
    wrong = {name: setting_meant(str(name), known, others) for name in given if name not in known}
    if not wrong:
        return
    meant = ", ".join(dict.fromkeys(filter(None, wrong.values())))
    hints = [f"Did you mean {meant}?"] if meant else []
    for name in (name for name, near in wrong.items() if near is None):
        words = others.get(name) if isinstance(others, Mapping) else None
        hints += filter(None, (words, None if name in others and words else otherwise))
        hints += [] if words or otherwise else [listed(what, known)]
    names = ", ".join(f"'{name}'" for name in wrong)
    raise ConfigError(f"{what} has no {noun}{'s' * (len(wrong) > 1)} {names}. {' '.join(dict.fromkeys(hints))}")


def setting_meant(name: str, known: Collection[str], others: Collection[str]) -> str | None:
    """The setting that was probably meant; None where it belongs elsewhere, or is rather of a known kind."""
    if name in others:
        return None
    if not isinstance(others, Hints):
        return nearest(name, known)
    return nearest(name, known, _NEAR if others.get(name) is None else _SURELY)


def listed(what: str, known: Collection[str]) -> str:
    """All names, or where to find them if they are many."""
    if len(known) <= FEW:
        return f"They are: {', '.join(sorted(known))}."
    return f"There are {len(known)}: help(agl.{what}) explains them, and so does docs/configuration.md."


def nearest(name: str, known: Collection[str], alike: float = _ALIKE) -> str | None:
    """The setting that was probably meant; None where nothing is near."""
    name = name.rpartition(".")[2]  # verl's settings stand in groups
    other = OTHER_LIBRARIES_NAMES.get(name.lower())
    if other == "run_dir" and "to" in known:
        return "to"
    if other in known:
        return other
    return next(iter(difflib.get_close_matches(name.lower(), known, n=1, cutoff=alike)), None)


_SAME_AS = {
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("bf16", "bf"), "bfloat16"),
    **dict.fromkeys(("fp32", "f32", "float", "single", "full"), "float32"),
    **dict.fromkeys(("fp64", "f64", "double"), "float64"),
}
"""Short names of values."""


def can_be(given: Any, known: Iterable[Any], also: str = "") -> str:
    """Which values there are, and which of them was probably meant by another: what follows "NAME is VALUE; "."""
    names = {str(name).lower().replace("-", "_"): name for name in known}
    wanted = str(given).lower().replace("-", "_").removeprefix("torch.")
    wanted = _SAME_AS.get(wanted, wanted) if _SAME_AS.get(wanted) in names else wanted
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=_ALIKE)
    near.sort(key=lambda name: name[:1] != wanted[:1])
    *most, last = [*map(repr, names.values()), *filter(None, [also])]
    listed = f"{', '.join(most)} or {last}" if most else last
    return f"it can be {listed}.{f' Did you mean {names[near[0]]!r}?' if near and wanted else ''}"


@dataclass(frozen=True, slots=True)
class Needs:
    """Stands beside a setting, in `Annotated[…]`: where it plays a part. One that was changed and plays none is a
    mistake."""

    used: Callable[[Any], bool]
    """Whether the settings use it."""
    words: str
    """What it needs, as a part of a sentence."""


def one_of(table: Mapping[str, Any], has: Callable[[Any], bool] = lambda _: True) -> str:
    """The names of what has a property, for a message: 'this' or 'that'."""
    return " or ".join(repr(name) for name, one in table.items() if has(one))


@dataclass(frozen=True, kw_only=True)
class SettingsGroup:
    """Settings that belong together, and may be given together. It knows which of them were given, and by which names
    (`_given`: None for the group's own); and whether it has become a part of an algorithm (`_settled`)."""

    if not TYPE_CHECKING:

        def __new__(cls, *positional: Any, **given: Any) -> Self:
            refuse_unknown(cls.__name__, positional, given, [f.name for f in fields(cls)], None)
            made = super().__new__(cls)
            object.__setattr__(made, "_given", dict.fromkeys(given))
            return made


def as_number(value: Any) -> str:
    """How a number is written that a person would read in a text or an object; nothing for another value."""
    if not isinstance(value, str):
        return as_plain(value)
    if re.fullmatch(r"[-+]?\d+(?:[.,]\d+)?%", value):
        return f" Write {value} as {float(value[:-1].replace(',', '.')) / 100:g}."
    if re.fullmatch(r"[-+]?\d+,\d+", value):
        return f" A number has a point here: {value.replace(',', '.')}."
    if re.search(r"[,; ]\s*[\w.]+=", value):
        return " One setting is given at a time, each with an option or an argument of its own."
    if re.fullmatch(r"[-+]?\d+(?:[_' ]\d+)+", value):
        return f" Write it in digits alone: {re.sub(r'[^-+0-9]', '', value)}."
    if re.fullmatch(r"[-+]?[\d.]+(?:e[-+]?\d+)?\s*[a-zA-Z]{1,8}", value):
        return " Write the number alone, without a letter or a unit behind it."
    return ""


def as_plain(value: Any) -> str:
    """How a value is written in Python's own kinds, that an object of a library stands for; nothing for another."""
    kind, library = type(value).__name__, type(value).__module__.partition(".")[0]
    if isinstance(value, Enum):
        return f" Give its value: {kind}.{value.name}.value."
    if hasattr(value, "total_seconds"):
        return f" Give its seconds: {value.total_seconds():g}."
    if isinstance(value, Sequence) and len(value) == 1 and not isinstance(value, str | bytes):
        return f" Give it without brackets: {value[0]!r}."
    if library in ("numpy", "torch") and hasattr(value, "item"):
        return f" It is {library}'s {kind}, whose .item() is one of Python's own."
    if library in ("decimal", "fractions"):
        return f" It is a {kind}: give float(…) of it."
    name = value.__name__ if isinstance(value, type) else str(value)
    of_a_dtype = value.__module__ == "numpy" if isinstance(value, type) else library == "torch"
    return f" Give its name: '{name.removeprefix('torch.')}'." if of_a_dtype else ""


_NEVER = (-1, 0, None, False, "never", "none", "no", "off", "disabled")
_ALL = (-1, None, math.inf, "all", "inf", "unlimited", "infinity")


def as_count(name: str, value: Any, *, zero: bool) -> str:
    """How a number is written that a person would read in a value: never, off and all, too, where a setting takes a
    number for them. `zero`: whether it may be 0."""
    given = value.lower() if isinstance(value, str) else value
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", given):
        return f" It is a text: write it without quotes, {value}."
    if name.startswith("keep") and given in _ALL:
        return " For all, give a large number, such as 1000000."
    if isinstance(value, float) and value.is_integer():
        return f" Write it without a point: {value:.0f}."
    never = isinstance(given, Hashable) and given in _NEVER
    if not never or not (name.endswith("every") or name == "max_grad_norm"):
        return as_number(value)
    return " 0 turns it off." if zero else " For never, give a number above that of the steps."


def check_address(what: str, url: object, example: str = "https://api.openai.com/v1") -> None:
    """Raises ConfigError for what is no address of an HTTP server."""
    if not isinstance(url, str) or not re.match(r"https?://[^/]", url):
        raise ConfigError(f"{what} is {url!r}; it begins with http:// or https://, for example {example}.")


_VALIDATORS_WORDS = (
    (r"^value error, ", ""),
    (r"^input should be a valid integer.*", "it must be a whole number"),
    (r"^input should be a valid (number|decimal).*", "it must be a number"),
    (r"^input should be a valid boolean.*", "it must be true or false"),
    (r"^input should be a valid string", "it must be a text"),
    (r"^input should be (a valid )?", "it must be "),
    (r"\bgreater than or equal to\b", "at least"),
    (r"\bless than or equal to\b", "at most"),
    (r"\bgreater than\b", "above"),
    (r"\bless than\b", "below"),
    (r"\bdictionary\b", "dict"),
)
"""Pydantic's words about a value, and ours for them."""


def of_validator(sentence: str) -> str:
    """What pydantic says of a value, in the words that all other values are refused in."""
    for theirs, ours in _VALIDATORS_WORDS:
        sentence = re.sub(theirs, ours, sentence, flags=re.IGNORECASE)
    return sentence[:1].lower() + sentence[1:]
