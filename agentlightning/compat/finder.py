"""Serves old module paths without a file for each, and adds what the table says to modules and classes of today.

The front door puts one finder at the head of `sys.meta_path`. It looks at names under `agentlightning.` that the table
knows, and does one of two things when such a module is first imported:

    a path that exists no more   becomes a module whose names lead to today's (`_OldPath`)
    a path that exists           is loaded from its file as ever; then (`extend`) its `__getattr__` finds older names,
                                 its classes get their older methods, its callables their older arguments

So nothing below has to know of older names: without the finder the package is the same, and lacks them. A script that
uses none pays for the table, some milliseconds of the import, and one look at the keywords of each call.

A callable that lacks an older argument is wrapped once, when its module is loaded (`_accept_older_words`). A call in
today's words goes straight through. An older word is turned into newer ones by its line in the table, which gives

    a newer word                 `max_tasks=3` becomes `max_rollouts=3`
    a function of this package   called with (arguments, value); it edits the arguments, and may return a context
                                 manager that is open during the call
    ""                           the word asks for nothing that would be missed, or is refused for values that do
    None                         the word is refused, with the line's note

A word that both have (`Trainer(adapter=)`) is read by its line only if the value describes a part, as 0.3 allowed (a
class, a function that makes it, an import path, a dictionary), instead of being one.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_loader
from types import CodeType, FunctionType, ModuleType
from typing import Any

from agentlightning.compat.lookup import NotKept, follow, meant, of_others, resolve, why_not
from agentlightning.compat.notice import use
from agentlightning.compat.row import Old
from agentlightning.compat.table import ARGUMENTS, BY_NAME, MEMBERS, MODULES, NAMES
from agentlightning.errors import ConfigError

PACKAGE = "agentlightning."
OLD_PATHS = {old.name: old for old in MODULES}
_EXTENDED = {old.name.partition(":")[0] for old in (*NAMES, *MEMBERS, *ARGUMENTS)}


class OldNames:
    """The finder."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(PACKAGE):
            return None
        old = BY_NAME.get(":".join(name.rsplit(".", 1)))
        if old is not None and old.to is None and name not in OLD_PATHS:  # from agentlightning import NotKeptAnyMore
            raise NotKept(why_not(old))
        if name not in _EXTENDED and name not in OLD_PATHS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None:
            return _old_module(name)
        if name in _EXTENDED and type(spec.loader) is SourceFileLoader:
            spec.loader = _Extending(spec.loader.name, spec.loader.path)
        return spec


class OthersNames:
    """Comes last, for a name of the package that nobody else finds: slips, and names that another library has, are
    explained."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        module, _, last = name.rpartition(".")
        if (words := of_others(module, last)) is not None:
            raise NotKept(words)
        if module.partition(".")[0] == "agentlightning" and (near := meant(module, last)):
            raise NotKept(f"There is no {name}{near}")


def install() -> None:
    """Put the finders in place. Once is enough; repeating changes nothing."""
    if OldNames not in sys.meta_path:
        sys.meta_path.insert(0, OldNames)  # pyright: ignore[reportArgumentType]
        sys.meta_path.append(OthersNames)  # pyright: ignore[reportArgumentType]


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
    """A module whose names lead to today's; a path that was a function's name too can still be called."""

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
        public = [n for n in public if not isinstance(getattr(newer, n, None), ModuleType)]
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
    _accept_older_words(module, [old for old in ARGUMENTS if old.name.startswith(f"{name}:")])


class _Member:
    """A method or property of an older class, found when it is asked for."""

    def __init__(self, old: Old) -> None:
        self._old = old

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        value = follow(self._old)
        use(self._old)
        return value.__get__(instance, owner)


_TODAY = ("inline", "processes", "remote")
"""What may be given by name today."""


def _accept_older_words(module: ModuleType, lines: Iterable[Old]) -> None:
    """Let the callables of a module take the arguments that these lines of the table name."""
    words: dict[str, dict[str, Old]] = defaultdict(dict)
    for old in lines:
        path, _, word = old.name.partition(":")[2].removesuffix("=)").partition("(")
        words[path][word] = old
    for path, rows in words.items():
        _wrap(module, path, rows)


def _wrap(module: ModuleType, path: str, rows: dict[str, Old]) -> None:
    """Wrap a function, a class's constructor or a method so that it takes the older words."""
    *outer, name = path.split(".")
    owner = functools.reduce(getattr, outer, module)
    if isinstance(getattr(owner, name), type):
        owner, name = getattr(owner, name), "__init__"
        if type(owner).__call__ is not type.__call__:  # its metaclass looks at the words before there is an object
            _of_class[owner] = rows
            _translate_first(type(owner))
    original = getattr(owner, name)
    setattr(owner, name, _with_words(original, rows))


_of_class: dict[type, dict[str, Old]] = {}
"""Older words of classes whose metaclass refuses words that it does not know."""


def _translate_first(metaclass: Any) -> None:
    """Let the metaclass see the newer words. Once is enough; repeating changes nothing."""
    original = metaclass.__call__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        # A derived class with an __init__ of its own may have words of its own; it hands older ones on by itself.
        rows = next((_of_class[c] for c in cls.__mro__ if c in _of_class and c.__init__ is cls.__init__), None)
        if rows is None or rows.keys().isdisjoint(kwargs):
            return original(cls, *args, **kwargs)
        return _with_words(functools.wraps(cls.__init__)(functools.partial(original, cls)), rows)(*args, **kwargs)

    metaclass.__call__ = make


def _with_words(original: Callable[..., Any], rows: dict[str, Old]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if rows.keys().isdisjoint(kwargs):
            return original(*args, **kwargs)
        from inspect import signature  # slow to load, and seldom needed

        today = signature(getattr(original, "__wrapped__", original)).parameters
        given = {word for word in rows.keys() & kwargs.keys() if word not in today or _described(kwargs[word])}
        if not given:
            return original(*args, **kwargs)
        with ExitStack() as stack:
            for word in rows:  # in the table's order
                if word in given:
                    _translate(rows[word], word, kwargs, stack)
            made = original(*args, **kwargs)
        for word in given:  # a call that fails says why, and nothing of newer words
            use(rows[word])
        return made

    return call


def _described(value: Any) -> bool:
    """Whether a part is described by something else than itself."""
    return isinstance(value, type | FunctionType | Mapping) or (isinstance(value, str) and value not in _TODAY)


def _translate(old: Old, word: str, arguments: dict[str, Any], stack: ExitStack) -> None:
    """Turn an older argument into newer ones. What reads it may return a context for the call."""
    value = arguments.pop(word)
    if old.to is None:
        raise ConfigError(f"{word}=: {old.note}")
    if old.accepts is not None and not any(value is one or value == one for one in old.accepts):
        raise ConfigError(f"{word}={value!r} would have no effect: {old.note}. Leave it out.")
    if old.to.startswith("agentlightning."):
        context = follow(old)(arguments, value)
        if context is not None:
            stack.enter_context(context)
    elif old.to:
        arguments.setdefault(old.to, value)
