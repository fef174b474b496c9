"""Settings that belong together, as a record: `GRPO(…, kl=agl.Reference(coef=0.02))`; and their flat names.

Every setting of a record has a flat name, too, in one table (`FLAT`): `GRPO(…, kl_coef=0.02)` means the same. Scripts,
files of settings and `run.json` use either, runs and `--print-config` write the flat ones. What a record does not say
is as the algorithm has it. Both spellings of one setting at once are refused.

What stands beside a setting in `Annotated[…]` is checked here: a number's bounds, and what it needs to have an effect.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from os import PathLike
from types import UnionType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le

from agentlightning.arguments import GivenByName, Needs, SettingsGroup, as_count, as_plain, refuse_unknown
from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from agentlightning.algorithm.credit.units import Use
    from agentlightning.types import Outcome

R = TypeVar("R")
W = TypeVar("W")

_SAME: Mapping[str, tuple[str, ...]] = {
    "calls": (
        *("temperature", "top_p", "top_k", "min_p", "val_temperature", "filter_replay", "train_agents"),
        *("train_prompts", "max_calls", "max_tokens", "cut_long_prompts", "strict_requests", "renderer"),
    ),
    "compute": (
        *("device", "dtype", "max_concurrency", "in_flight", "gradient_checkpointing", "offload", "ranks"),
        *("tensor_parallel", "backend_options"),
    ),
}
"""Records whose settings have the same name inside and outside."""
FLAT: Mapping[str, tuple[str, str]] = {
    "kl_coef": ("kl", "coef"),
    "kl_in": ("kl", "where"),
    "kl_estimator": ("kl", "estimator"),
    "kl_target": ("kl", "target"),
    "reference_every": ("kl", "every"),
    "reference_share": ("kl", "share"),
    "replay": ("replay", "groups"),
    "replay_size": ("replay", "size"),
    "replay_priority": ("replay", "priority"),
    "correction": ("correction", "kind"),
    "correction_cap": ("correction", "cap"),
    "correction_floor": ("correction", "floor"),
    "correction_veto": ("correction", "veto"),
    "overlong_tokens": ("overlong", "tokens"),
    "overlong_margin": ("overlong", "margin"),
    "baseline": ("baseline", "key"),
    "baseline_decay": ("baseline", "decay"),
    "teacher": ("teacher", "model"),
    "teacher_url": ("teacher", "url"),
    "hint": ("teacher", "hint"),
    "preflight": ("preflight", "mode"),
    "flat_steps": ("preflight", "flat_steps"),
    "branches": ("branches", "continuations"),
    "branch_share": ("branches", "share"),
    "branch_turns": ("branches", "turns"),
    "branch_train": ("branches", "train"),
    "explore": ("explore", "how"),
    "explore_below": ("explore", "below"),
    "explore_forks": ("explore", "continuations"),
    "explore_back": ("explore", "back"),
    "lam": ("critic", "lam"),
    "critic_warmup": ("critic", "warmup"),
    "weight_decay": ("adam", "weight_decay"),
    "adam_beta1": ("adam", "beta1"),
    "adam_beta2": ("adam", "beta2"),
    "max_grad_norm": ("adam", "max_grad_norm"),
    **{name: ("calls", name) for name in _SAME["calls"]},
    **{name: ("compute", name) for name in _SAME["compute"]},
    "reward_weights": ("rewards", "weights"),
    "watched_parts": ("rewards", "watched"),
    "reward_scale": ("rewards", "scale"),
    "outcome_use": ("rewards", "outcomes"),
    "val_every": ("validation", "every"),
    "val_before": ("validation", "before"),
    "val_repeats": ("validation", "repeats"),
    "save_every": ("checkpoints", "every"),
    "keep_checkpoints": ("checkpoints", "keep"),
    "checkpoint_copy": ("checkpoints", "copy"),
    "check_packing_every": ("diagnostics", "packing_every"),
    "gradient_noise_every": ("diagnostics", "noise_every"),
    "max_logprob_gap": ("diagnostics", "max_logprob_gap"),
    "stall_seconds": ("stall", "seconds"),
    "on_stall": ("stall", "action"),
}
"""By flat name: the record, and its field. A record that is given as a plain value is its first field."""


if TYPE_CHECKING:

    @dataclass(frozen=True, kw_only=True)
    class FlatNames:
        """The flat names as type checkers see them, so that scripts which use them are checked; there are no fields."""

        kl_coef: float = 0.0
        kl_in: Literal["loss", "reward"] = "loss"
        kl_estimator: Literal["k1", "k2", "k3"] = "k3"
        kl_target: float | None = None
        reference_every: int | None = None
        reference_share: float = 1.0
        replay_size: int = 64
        replay_priority: float = 1.0
        correction_cap: float = 2.0
        correction_floor: float = 0.5
        correction_veto: float | None = None
        overlong_tokens: int | None = None
        overlong_margin: int = 0
        baseline_decay: float = 0.95
        teacher_url: str | None = None
        hint: str | None = None
        flat_steps: int = 5
        branch_share: float = 0.5
        branch_turns: int = 2
        branch_train: bool = True
        explore_below: float = 0.25
        explore_forks: int = 4
        explore_back: int = 1
        lam: float = 1.0
        critic_warmup: int = 0
        temperature: float = 1.0
        top_p: float = 1.0
        top_k: int = 0
        min_p: float = 0.0
        val_temperature: float | None = None
        filter_replay: bool = False
        train_agents: str | None = None
        train_prompts: str | None = None
        max_calls: int | None = None
        max_tokens: int | None = None
        cut_long_prompts: bool = False
        strict_requests: bool = False
        renderer: str | None = None
        device: str = "auto"
        dtype: str = "float32"
        max_concurrency: int = 64
        in_flight: Literal["finish", "continue"] = "finish"
        gradient_checkpointing: bool = False
        offload: bool = False
        ranks: int = 1
        tensor_parallel: int = 1
        backend_options: Mapping[str, Any] = field(default_factory=dict)
        reward_weights: Mapping[str, float] = field(default_factory=dict)
        watched_parts: Sequence[str] = ()
        reward_scale: Literal["none", "source"] = "none"
        outcome_use: Mapping[Outcome, Use] = field(default_factory=dict)
        val_every: int = 10
        val_before: bool | None = None
        val_repeats: int = 1
        save_every: int = 10
        keep_checkpoints: int = 2
        checkpoint_copy: str | None = None
        check_packing_every: int = 50
        gradient_noise_every: int = 5
        max_logprob_gap: float | None = None
        weight_decay: float = 0.0
        adam_beta1: float = 0.9
        adam_beta2: float = 0.999
        max_grad_norm: float = 1.0
        stall_seconds: float = 900.0
        on_stall: Literal["wait", "cancel", "stop"] = "wait"
else:

    class FlatNames:
        """There are no fields of these names."""


def flat_of(record: SettingsGroup, name: str) -> dict[str, str]:
    """The flat names of a record's fields, by field, where it is the setting `name`; empty where it has none."""
    return {own: flat for flat, (setting, own) in FLAT.items() if setting == name}


class ByName(GivenByName):
    """A dataclass that a setting may be given as, or its fields by name, as a file has them."""

    @classmethod
    def read(cls, given: Any, setting: str) -> Self:
        """The object that the setting was given as. Raises ConfigError for what is none."""
        if isinstance(given, cls):
            return given
        known = [f for f in fields(cls) if f.init]  # pyright: ignore[reportArgumentType]
        needed = [f.name for f in known if f.default is MISSING and f.default_factory is MISSING]
        name = cls.__name__
        if not isinstance(given, Mapping):
            example = f"agl.{name}({', '.join(f'{n}=…' for n in needed or ['…'])})".replace("…=…", "…")
            raise ConfigError(f"{setting} is {given!r}; it takes {example}, or its settings by name.")
        refuse_unknown(name, (), given, [f.name for f in known], None)
        if missing := [n for n in needed if n not in given]:
            raise ConfigError(f"{setting} needs {missing[0]}.")
        return cls(**given)

    def by_name(self) -> dict[str, Any]:
        """Its fields, as a record of the run keeps them."""
        return asdict(self)  # pyright: ignore[reportArgumentType]


if TYPE_CHECKING:

    class Nested(Generic[R, W]):
        """A setting that is a record `R`; a value `W` given instead is its first field."""

        def __init__(self, default: R) -> None: ...

        def __get__(self, of: object, owner: Any = None) -> R: ...

        def __set__(self, of: object, value: R | W | Mapping[str, Any] | None) -> None: ...
else:

    class Nested(Generic[R, W]):
        def __new__(cls, default: R) -> Any:
            return field(default=default)


@cache
def records_of(kind: type[Any]) -> dict[str, SettingsGroup]:
    """The records among an algorithm's settings, by name, as the algorithm has them."""
    return {f.name: f.default for f in fields(kind) if isinstance(f.default, SettingsGroup)}


@cache
def flat_names(kind: type[Any]) -> Mapping[str, tuple[str, str]]:
    """The flat names that an algorithm takes: the record and its field of each."""
    return {flat: place for flat, place in FLAT.items() if place[0] in records_of(kind)}


def take_defaults(kind: type[Any]) -> None:
    """Let a class give its algorithm other defaults by flat names, as it may by records: `replay_size: int = 8`."""
    own = vars(kind).get("__annotations__", {})
    records = {record for record, _ in FLAT.values()}
    given = [n for n in own if n in FLAT and n in vars(kind)]
    named = [n for n in given if n not in records or not isinstance(vars(kind)[n], SettingsGroup | Field)]
    for name in sorted(named, key=lambda n: n != FLAT[n][0]):  # a record's own name first
        record, of_record = FLAT[name]
        value = vars(kind)[name]
        if isinstance(value, Field):
            value = value.default if value.default_factory is MISSING else value.default_factory()
        inherited = next(vars(base)[record] for base in kind.__mro__[1:] if record in vars(base))
        held = vars(kind).get(record) if record != name else inherited
        default: Any = held.default if isinstance(held, Field) else held or inherited
        del own[name]
        delattr(kind, name)
        own[record] = Nested[type(inherited), Any]
        setattr(kind, record, replace(default, **{of_record: value}))


def gathered(kind: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they were given, with records in the place of flat names, mappings and plain values."""
    found = {name: value for name, value in given.items() if name not in FLAT}
    for name, default in records_of(kind).items():
        flat = {own: other for other, (record, own) in FLAT.items() if record == name and other in given}
        plain = {} if name in flat.values() or name not in given else {"": given[name]}
        if flat or plain:
            found[name] = _merged(name, default, given.get(name), {o: f for o, f in flat.items() if f != name}, given)
    return found


def _merged(
    name: str, default: SettingsGroup, whole: Any, flat: Mapping[str, str], given: Mapping[str, Any]
) -> SettingsGroup:
    """The record `name`: `whole` is what was given under its own name, `flat` the flat names that were given besides,
    by field."""
    names = [f.name for f in fields(default)]
    spelled: dict[str, str | None] = {}
    match whole:
        case None:
            changes = {}
        case SettingsGroup() if isinstance(whole, type(default)):
            spelled = dict(vars(whole)["_given"])
            changes = {own: getattr(whole, own) for own in spelled}
        case SettingsGroup():
            raise ConfigError(f"{name} is an agl.{type(whole).__name__}; it takes an agl.{type(default).__name__}.")
        case Mapping():
            refuse_unknown(type(default).__name__, (), whole, names, None)
            changes = dict(whole)
        case _:
            changes = {names[0]: whole}
            spelled[names[0]] = name
    settled = isinstance(whole, SettingsGroup) and "_settled" in vars(whole)
    for own, other in flat.items():
        if own in changes and not settled:
            raise ConfigError(f"{other} and {name}.{own} are the same setting: give one of them.")
        changes[own], spelled[own] = given[other], other
    made = replace(default, **changes)
    object.__setattr__(made, "_given", {own: spelled.get(own) for own in changes})
    object.__setattr__(made, "_settled", True)
    return made


def changed(record: R, **changes: Any) -> R:
    """The record with other values, and with what it knows of how it was given."""
    assert isinstance(record, SettingsGroup)
    made = replace(record, **changes)
    object.__setattr__(made, "_given", {**dict.fromkeys(changes, ""), **vars(record)["_given"]})
    if "_settled" in vars(record):
        object.__setattr__(made, "_settled", True)
    return made


def replaced(settings: Any, changes: Mapping[str, Any]) -> Any:
    """The settings with others in their place, by any of their names; what is not named stays."""
    whole = {name: getattr(settings, name) for name in records_of(type(settings)) if name in changes}
    mains = {name: changed(record, **{fields(record)[0].name: changes[name]}) for name, record in whole.items()}
    return replace(settings, **{**changes, **mains})


def merged(kind: type[Any], given: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they are given, with those of `over` in their place, however either is spelled: `kl_coef`, `kl.coef`
    or a mapping `kl`."""
    found, records = dict(given), records_of(kind)
    for name, value in over.items():
        head, _, own = name.partition(".")
        alone = not own and FLAT.get(name, (name, ""))[0] not in found  # as it was written, so that it is refused so
        record, own = (head, own) if own else FLAT.get(name, (name, ""))
        if record not in records or not own or alone:
            found[name] = value
            continue
        flat, whole = flat_of(records[record], record), found.pop(record, {})
        if not isinstance(whole, Mapping):
            whole = {fields(records[record])[0].name: whole}
        if flat.get(own) != record:
            found.pop(flat.get(own, ""), None)
        found[record] = {**whole, own: value}
    return found


def flattened(settings: Any, *, shown: bool = True) -> dict[str, Any]:
    """All settings by their flat names, in their order. Not `shown`: also those that are left out of texts."""
    found: dict[str, Any] = {}
    for f in fields(settings):
        value = getattr(settings, f.name)
        if isinstance(value, SettingsGroup) and (names := flat_of(value, f.name)):
            found |= {flat: getattr(value, own) for own, flat in names.items()}
        elif f.repr or not shown:
            found[f.name] = value
    return found


def value_of(settings: Any, name: str) -> Any:
    """The value of a setting by its name: that of a field, a flat one, or `kl.coef`."""
    record, own = place_of(settings, name)
    value = getattr(settings, record)
    return getattr(value, own) if own else value


def place_of(settings: Any, name: str) -> tuple[str, str]:
    """The field and, where that is a record, the record's field of a setting."""
    head, _, own = name.partition(".")
    return FLAT[name] if name in flat_names(type(settings)) else (head, own)


def written(settings: Any, name: str) -> str:
    """The name of a setting as it was written, where it was given in a record: `kl.coef`."""
    record, own = place_of(settings, name)
    value = getattr(settings, record)
    given = vars(value)["_given"] if own and "_settled" in vars(value) else {}
    nested = None in given.values()
    return given.get(own) or (f"{record}.{own}" if nested else name)


def as_written(settings: Any, message: str) -> str:
    """The message, with the names of settings that were given in records as they were written."""
    for name, (record, _) in flat_names(type(settings)).items():
        if name != record and (path := written(settings, name)) != name:
            message = re.sub(rf"(?<![.\w]){name}\b", path, message)
    return message


@cache
def names_of(kind: type[Any]) -> tuple[str, ...]:
    """All names that an algorithm's settings have: its own, and the flat ones of its records."""
    own = [f.name for f in fields(kind) if f.init]
    return (*own, *(name for name in flat_names(kind) if name not in own))


def paths_of(kind: type[Any]) -> tuple[str, ...]:
    """`names_of`, and those of records' fields as `kl.coef`."""
    nested = (f"{name}.{f.name}" for name, record in records_of(kind).items() for f in fields(record))
    return (*names_of(kind), *nested)


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


def _of_record(name: str, record: SettingsGroup) -> dict[str, Setting]:
    """By their flat names, or, where they have none, as `kl.coef`."""
    flat = flat_of(record, name)
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
                raise ConfigError(f"{written(settings, name)}{of} is {value!r}; it must be {called}.{as_plain(value)}")


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
    unset = " (or None)" if type(None) in get_args(setting.type) else ""
    meant = as_count("" if unset else name, value, zero=Ge(0) in setting.bounds)
    if whole and not isinstance(number, int):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number{unset}.{meant}")
    if not math.isfinite(number) or not all(_within(number, bound) for bound in setting.bounds):
        text = " and ".join(_words(one, whole=whole) for one in sorted(setting.bounds, key=lambda b: isinstance(b, Le)))
        raise ConfigError(f"{name} is {value!r}; it must be a number {text}{unset}.{meant}")


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
