"""Serves old module paths without a file for each, and adds what the table says to modules and classes of today.

A finder at the front of `sys.meta_path` looks at names under `agentlightning.` only. A path that exists is loaded as
ever; if the table has old names for it, they are added once it is loaded: names by the module's `__getattr__`, members
of classes by a descriptor, arguments by a wrapper that steps in when an unknown word is given. A path that exists no
more becomes a module whose names lead to today's.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_loader
from inspect import signature
from types import CodeType, FunctionType, ModuleType
from typing import Any

from agentlightning.compat.notice import use
from agentlightning.compat.table import ARGUMENTS, BY_NAME, MEMBERS, MODULES, NAMES, Old
from agentlightning.errors import ConfigError

PACKAGE = "agentlightning."
TODAY = ("inline", "processes", "remote")
"""What may be given by name today."""
OLD_PATHS = {old.name: old for old in MODULES}
_EXTENDED = {old.name.partition(":")[0] for old in (*NAMES, *MEMBERS, *ARGUMENTS)}


class NotKept(ConfigError, ImportError):
    """An old name that leads nowhere; the message says why, and what to do instead."""


def resolve(module: str, name: str) -> Any:
    """What an old name of a module means today.

    Raises AttributeError for one that the table does not know, and NotKept for one that is not kept.
    """
    old = BY_NAME.get(f"{module}:{name}")
    if old is None:
        raise AttributeError(f"module '{module}' has no attribute '{name}'{_meant(module, name)}")
    value = follow(old)
    use(old)
    return value


def _meant(module: str, name: str) -> str:
    known = {n.lower(): n for n in dir(sys.modules.get(module)) if not n.startswith("_")}
    near = get_close_matches(name.lower(), known, n=1) if not name.startswith("_") else []
    return f". Did you mean: '{known[near[0]]}'?" if near else ""


def follow(old: Old) -> Any:
    """The object that a line of the table leads to."""
    if old.to is None:
        raise NotKept(f"{old.name.replace(':', '.')}: {old.note}")
    module, _, path = old.to.partition(":")
    return functools.reduce(getattr, filter(None, path.split(".")), import_module(module))


class OldNames:
    """The finder."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(PACKAGE) or (name not in _EXTENDED and name not in OLD_PATHS):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None:
            return _old_module(name)
        if name in _EXTENDED and type(spec.loader) is SourceFileLoader:
            spec.loader = _Extending(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Put the finder in place. Once is enough; repeating changes nothing."""
    if OldNames not in sys.meta_path:
        sys.meta_path.insert(0, OldNames)  # pyright: ignore[reportArgumentType]


# ---- paths that exist no more ---------------------------------------------------------------------------------------


def _old_module(name: str) -> ModuleSpec | None:
    old = OLD_PATHS.get(name)
    if old is None:
        return None
    if old.to is None:
        raise NotKept(f"{name}: {old.note}")
    is_package = any(path.startswith(f"{name}.") for path in OLD_PATHS)
    # `python -m` makes the origin sys.argv[0], which has to be a text.
    return spec_from_loader(name, _OldPath(old), origin=f"<{name}>", is_package=is_package)


class _OldModule(ModuleType):
    """Its names lead to today's; a path that was a function's name too can still be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return resolve("agentlightning", name)(*args, **kwargs)


class _OldPath(Loader):
    def __init__(self, old: Old) -> None:
        self._old = old

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _OldModule(spec.name, f"Names of agentlightning 0.3, from {self._old.to}.")

    def exec_module(self, module: ModuleType) -> None:
        old, name = self._old, module.__name__
        assert old.to is not None
        newer = import_module(old.to)
        own = [row.name.partition(":")[2] for row in NAMES if row.name.startswith(f"{name}:") and row.to]
        public = getattr(newer, "__all__", [n for n in vars(newer) if not n.startswith("_")])
        module.__dict__["__all__"] = [*public, *own]

        def get(wanted: str) -> Any:
            if wanted.startswith("__"):
                raise AttributeError(f"module '{name}' has no attribute '{wanted}'")
            for home in (name, str(old.to)):
                if f"{home}:{wanted}" in BY_NAME:
                    return resolve(home, wanted)
            value = getattr(newer, wanted, None)
            if value is None and not hasattr(newer, wanted):
                raise AttributeError(f"module '{name}' has no attribute '{wanted}'")
            if isinstance(value, ModuleType):
                raise AttributeError(f"module '{name}' has no attribute '{wanted}'")
            home = "agentlightning" if wanted in import_module("agentlightning").__all__ else old.to
            use(Old(f"{name}:{wanted}", f"{home}:{wanted}", old.note))
            return value

        module.__dict__["__getattr__"] = get

    def get_code(self, name: str) -> CodeType:
        """For `python -m`: the newer module's `main`."""
        return compile(f"from {self._old.to} import main\nmain()", f"<{name}>", "exec")


# ---- modules of today ------------------------------------------------------------------------------------------------


class _Extending(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        extend(module)


def extend(module: ModuleType) -> None:
    """Add what the table has for this module."""
    name = module.__name__
    own = module.__dict__.get("__getattr__")

    def get(wanted: str) -> Any:
        if own is not None:
            try:
                return own(wanted)
            except AttributeError:
                pass
        return resolve(name, wanted)

    module.__dict__["__getattr__"] = get
    for old in MEMBERS:
        if old.name.startswith(f"{name}:"):
            cls, _, member = old.name.partition(":")[2].partition(".")
            setattr(getattr(module, cls), member, _Member(old))
    words: dict[str, dict[str, Old]] = defaultdict(dict)
    for old in ARGUMENTS:
        if old.name.startswith(f"{name}:"):
            callable_, _, word = old.name.partition(":")[2].removesuffix("=)").partition("(")
            words[callable_][word] = old
    for path, rows in words.items():
        _accept_words(module, path, rows)


class _Member:
    """A method or property of an older class, found when it is asked for."""

    def __init__(self, old: Old) -> None:
        self._old = old

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        value = follow(self._old)
        use(self._old)
        return value.__get__(instance, owner)


def _accept_words(module: ModuleType, path: str, rows: dict[str, Old]) -> None:
    """Wrap a function, a class's constructor or a method so that it takes the older words."""
    *outer, name = path.split(".")
    owner = functools.reduce(getattr, outer, module)
    if isinstance(getattr(owner, name), type):
        owner, name = getattr(owner, name), "__init__"
        if owner.__new__ is not object.__new__:  # it looks at the words too
            owner.__new__ = _without_words(owner.__new__, rows)
    original = getattr(owner, name)
    setattr(owner, name, _with_words(original, rows))


def _without_words(original: Callable[..., Any], rows: dict[str, Old]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return original(cls, *args, **{word: value for word, value in kwargs.items() if word not in rows})

    return new


def _with_words(original: Callable[..., Any], rows: dict[str, Old]) -> Callable[..., Any]:
    today = {p.name for p in signature(original).parameters.values()}

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if rows.keys().isdisjoint(kwargs):
            return original(*args, **kwargs)
        given = {word for word in rows.keys() & kwargs.keys() if word not in today or _described(kwargs[word])}
        if not given:
            return original(*args, **kwargs)
        with ExitStack() as stack:
            for word in rows:  # in the table's order
                if word in given:
                    _translate(rows[word], word, kwargs, stack)
            return original(*args, **kwargs)

    return call


def _described(value: Any) -> bool:
    """Whether a part is described by something else than itself."""
    return isinstance(value, type | FunctionType | Mapping) or (isinstance(value, str) and value not in TODAY)


def _translate(old: Old, word: str, arguments: dict[str, Any], stack: ExitStack) -> None:
    """Turn an older argument into newer ones. What reads it may return a context for the call."""
    value = arguments.pop(word)
    if old.to is None:
        raise ConfigError(f"{word}=: {old.note}")
    use(old)
    if old.to.startswith("agentlightning."):
        context = follow(old)(arguments, value)
        if context is not None:
            stack.enter_context(context)
    elif old.to:
        arguments.setdefault(old.to, value)
