"""Serves old module paths without a file for each, and adds what the table says to modules and classes of today.

The front door puts one finder at the head of `sys.meta_path`. It looks at names under `agentlightning.` that the table
knows, and does one of two things when such a module is first imported:

    a path that exists no more   becomes a module whose names lead to today's (`_OldPath`)
    a path that exists           is loaded from its file as ever; then (`extend`) its `__getattr__` finds older names,
                                 its classes get their older methods, its callables their older arguments (`arguments`)

So nothing below has to know of older names: without the finder the package is the same, and lacks them. What it costs a
script that uses none: the table, some milliseconds of the import, and the look that `arguments` describes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_loader
from types import CodeType, ModuleType
from typing import Any

from agentlightning.compat.arguments import accept_older_words
from agentlightning.compat.lookup import NotKept, follow, meant, of_others, resolve, why_not
from agentlightning.compat.notice import use
from agentlightning.compat.row import Old
from agentlightning.compat.table import ARGUMENTS, BY_NAME, MEMBERS, MODULES, NAMES

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
        if module == "agentlightning" and (near := meant(module, last)):
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
    accept_older_words(module, [old for old in ARGUMENTS if old.name.startswith(f"{name}:")])


class _Member:
    """A method or property of an older class, found when it is asked for."""

    def __init__(self, old: Old) -> None:
        self._old = old

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        value = follow(self._old)
        use(self._old)
        return value.__get__(instance, owner)
