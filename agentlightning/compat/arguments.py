"""Older arguments of today's functions and classes.

A callable of today that lacks an older argument is wrapped once, when its module is loaded. A call by today's words
goes straight through: the wrapper looks whether an older word is among the keywords, and that is all. An older word is
turned into newer ones as its line in the table says; what the table gives for it is one of

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
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import FunctionType, ModuleType
from typing import Any

from agentlightning.compat.lookup import follow
from agentlightning.compat.notice import use
from agentlightning.compat.row import Old
from agentlightning.errors import ConfigError

TODAY = ("inline", "processes", "remote")
"""What may be given by name today."""


def accept_older_words(module: ModuleType, lines: Iterable[Old]) -> None:
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
    return isinstance(value, type | FunctionType | Mapping) or (isinstance(value, str) and value not in TODAY)


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
