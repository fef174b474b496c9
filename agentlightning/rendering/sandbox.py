"""Chat templates come with models, and models are data: each runs in Jinja's sandbox with bounds on time and size.

What a template can see and call is what transformers gives it. What is bounded is counted while it runs, not guessed
from its text: steps of loops and calls, the characters that it makes, and the processor time of its thread.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, update_wrapper
from typing import Any, cast

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 2.0
"""Processor time that one rendering may take."""
CHARACTERS = 64 * 1024 * 1024
"""Of all texts that it makes on the way, together."""
TEMPLATE_CHARACTERS = 1024 * 1024
"""Of a template itself."""
_DEEPEST = 100
"""Blocks inside one another in a template: what compiles it calls itself for each."""
_LARGEST = 1_000_000
"""The largest number that a filter or a call may be given: most make so many characters, or wait for so many."""
_BITS = 4096
"""The longest integer that arithmetic may come to."""
_BETWEEN = 256
"""Steps between two looks at the clock."""
_WIDTH = re.compile(r"\d{6}|\*|\{[^{}]*:[^{}]*\{")
"""A width in a format that writes hundreds of thousands of characters, or one that is given with the values."""
_GIVEN = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "template", "given"),
        *("conversation", "tokenize", "chat_template", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("name", "tool_parser", "reasoning_parser", "thinking_retention"),
    }
)
"""What every template is given, and what what calls it has names for."""
_OPENS, _CLOSES = re.compile(r"\{%-?\s*(for|if|macro|call|filter|set|with|block)\b"), re.compile(r"\{%-?\s*end")


class TemplateTooLarge(TemplateError):
    """A template went beyond its bounds."""


class _Spent:
    """What one rendering has used."""

    def __init__(self) -> None:
        self.characters = 0
        self._steps = 0
        self._until = time.thread_time() + SECONDS

    def step(self, characters: int = 0) -> None:
        self._steps += 1
        self.write(characters)
        if self._steps % _BETWEEN == 0 and time.thread_time() > self._until:
            raise TemplateTooLarge(f"it works for more than {SECONDS:g} s")

    def write(self, characters: int) -> None:
        self.characters += characters
        if self.characters > CHARACTERS:
            raise TemplateTooLarge(f"it writes more than {CHARACTERS} characters")


_spent: ContextVar[_Spent | None] = ContextVar("agentlightning_template", default=None)


@contextmanager
def _counting() -> Iterator[None]:
    token = _spent.set(_Spent())
    try:
        yield
    finally:
        _spent.reset(token)


def render(template: str, messages: Iterable[Mapping[str, Any]], *, tools: Any, **given: Any) -> str:
    """What a chat template writes. Raises jinja2's TemplateError for one that is wrong or goes beyond its bounds."""
    from transformers.utils import chat_template_utils as theirs

    plain: Callable[[Any], Any] = getattr(theirs, "_plain_template_data", lambda data: data)
    alias: Callable[[Any], Any] = getattr(theirs, "_alias_reasoning_fields", lambda chat: chat)
    with _counting():
        try:
            return _compiled(template).render(
                messages=alias(plain(list(messages))), tools=plain(tools), documents=None, **plain(given)
            )
        except (RecursionError, MemoryError, OverflowError, SyntaxError) as error:
            raise TemplateTooLarge(f"it goes too far: {type(error).__name__}") from error


def arguments_of(template: str) -> frozenset[str]:
    """The names that a template takes from outside, besides those that every template is given."""
    names = meta.find_undeclared_variables(_environment().parse(template))
    return frozenset(name for name in names - _GIVEN if not name.endswith("_token"))


@lru_cache(maxsize=32)
def _compiled(template: str) -> Template:
    if len(template) > TEMPLATE_CHARACTERS:
        raise TemplateTooLarge(f"it has {len(template)} characters, and {TEMPLATE_CHARACTERS} are the most")
    depth = 0
    for tag in sorted([*_OPENS.finditer(template), *_CLOSES.finditer(template)], key=lambda found: found.start()):
        depth += 1 if tag.re is _OPENS else -1
        if depth > _DEEPEST:
            raise TemplateTooLarge(f"more than {_DEEPEST} of its blocks are inside one another")
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> Bounded:
    """With the filters, functions and tags that transformers gives to chat templates."""
    from transformers.utils import chat_template_utils as theirs

    known = theirs._compile_jinja_template("").environment  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    tags = [type(extension) for extension in known.extensions.values()]
    made = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=tags, finalize=_charged)
    made.globals.update({name: value for name, value in known.globals.items() if name != "lipsum"})
    made.globals.pop("lipsum", None)
    made.filters.update({name: _guarded(name, filter) for name, filter in known.filters.items()})
    return made


class Bounded(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which loops, calls, operators and filters are counted."""

    intercepted_binops = frozenset(["+", "-", "*", "**", "/", "//", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _CountedLoops().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return _charged(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        _now().step()
        if obj not in (self.counted, self.joined):
            _check_arguments(getattr(obj, "__name__", ""), getattr(obj, "__self__", None), args, kwargs)
        return _charged(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_arguments("format", value.__self__, (), {})
        return wrapped

    def counted(self, items: Any, characters: int) -> Iterator[Any]:
        """The items of a loop, each a step that writes so many characters of the template's own."""
        for item in items:
            _now().step(characters)
            yield item

    def written(self, characters: int) -> str:
        """Nothing; it says that so many characters of the template's own are being written."""
        _now().step(characters)
        return ""

    def joined(self, *parts: Any) -> str:
        """What `~` writes."""
        texts = [str(part) for part in parts]
        _now().write(sum(map(len, texts)))
        return "".join(texts)


class _CountedLoops:
    """Rewrites a template so that its loops, macros and `~` go through the environment."""

    def visit(self, tree: nodes.Template) -> nodes.Template:
        for node in [*tree.find_all(nodes.For)]:
            node.iter = _environment_call("counted", cast(nodes.Expr, node.iter), nodes.Const(_own_text(node)))
        for node in [*tree.find_all((nodes.Macro, nodes.CallBlock))]:
            node.body.insert(0, nodes.Output([_environment_call("written", nodes.Const(_own_text(node)))]))
        self._join(tree)
        for node in tree.find_all(nodes.Node):
            if getattr(node, "lineno", None) is None:
                node.lineno = 1
        return tree

    def _join(self, node: nodes.Node) -> None:
        for name, value in [*node.iter_fields()]:
            if isinstance(value, list):
                setattr(node, name, [self._with_join(item) for item in value])
            else:
                setattr(node, name, self._with_join(value))

    def _with_join(self, value: Any) -> Any:
        if not isinstance(value, nodes.Node):
            return value
        self._join(value)
        return (
            _environment_call("joined", *cast(list[nodes.Expr], value.nodes))
            if isinstance(value, nodes.Concat)
            else value
        )


def _environment_call(method: str, *arguments: nodes.Expr) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None)
    call.set_lineno(getattr(arguments[0], "lineno", None) or 1)
    return call


def _own_text(node: nodes.Node) -> int:
    """Characters that one pass through a loop or macro writes by itself, at most."""
    return sum(len(text.data) for text in node.find_all(nodes.TemplateData))


def _now() -> _Spent:
    spent = _spent.get()
    if spent is None:
        raise TemplateError("it runs outside of a rendering")
    return spent


def _charged(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _now().write(len(value))
    return value


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "*":
        for text, times in ((left, right), (right, left)):
            if isinstance(text, str | bytes | list | tuple) and isinstance(times, int):
                _now().write(len(text) * max(0, times))
    if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        _now().write(len(left) + len(right))
    if operator == "%" and isinstance(left, str):
        _check_arguments("format", left, right if isinstance(right, tuple) else (right,), {})
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(0, right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _BITS:
            raise TemplateTooLarge(f"it computes an integer of more than {_BITS} bits")


def _check_arguments(name: str, subject: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """What a method or a filter would make is charged before it is made, where its arguments multiply."""
    given = [*args, *kwargs.values()]
    if any(isinstance(value, int) and abs(value) > _LARGEST for value in given):
        raise TemplateTooLarge(f"it gives {name or 'a call'} a number beyond {_LARGEST}")
    if name in ("format", "format_map") and isinstance(subject, str) and _WIDTH.search(subject):
        raise TemplateTooLarge("it formats to a width of hundreds of thousands")
    texts = [value for value in given if isinstance(value, str)]
    if name == "replace" and isinstance(subject, str) and len(texts) > 1:
        _now().write(subject.count(texts[0]) * len(texts[1]))
    if name == "sum" and any(isinstance(value, list | tuple) for value in given):
        raise TemplateTooLarge("it adds lists with sum, which takes the square of their number")
    numbers = [abs(value) for value in given if isinstance(value, int)]
    if name in ("expandtabs", "indent", "tojson") and numbers:
        _now().write((_lines(subject) + 1) * max(numbers))
    if name in ("indent", "wordwrap", "translate") and texts and isinstance(subject, str):
        _now().write((_lines(subject) + 1) * max(map(len, texts)))
    if name == "join":
        items, between = (args[0] if args else (), subject) if isinstance(subject, str) else (subject, "")
        separator = between if isinstance(between, str) and between else (texts[0] if texts else "")
        if hasattr(items, "__len__"):
            _now().write(len(items) * len(separator))


def _lines(subject: Any) -> int:
    return len(subject) if hasattr(subject, "__len__") else 1


def _guarded(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, with what it is given and what it gives counted."""
    passed = int(getattr(filter, "jinja_pass_arg", None) is not None)

    def counted(*args: Any, **kwargs: Any) -> Any:
        _now().step()
        _check_arguments(name, args[passed] if len(args) > passed else None, args[passed + 1 :], kwargs)
        return _charged(filter(*args, **kwargs))

    return update_wrapper(counted, filter)
