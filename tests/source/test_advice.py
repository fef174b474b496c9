"""Whatever the package prints as advice can be typed: its commands, options, names, arguments, pages and variables.

All texts of the source are read, messages of errors among them, so that a new one is held to the same.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

import agentlightning as agl
from agentlightning import errors
from agentlightning.cli.app import app
from tests.source.trees import PACKAGE, ROOT, nodes_of, package_files

HOLE = "…"
"""What stands for a value that is put into a text."""
_OTHERS = ("OpenAI", "AsyncOpenAI", "Anthropic")
"""Clients of other packages that advice tells people to make."""


@cache
def files() -> list[Path]:
    """All source files but those about names of earlier versions, whose advice is tested with them."""
    return [file for file in package_files() if "compat" not in file.parts]


@cache
def texts(file: Path, *, docstrings: bool = False) -> tuple[str, ...]:
    """All texts in a file, with a hole for each value that is put in; parts that are written side by side are one."""
    skipped = {id(value) for node in nodes_of(file) if isinstance(node, ast.JoinedStr) for value in node.values}
    if not docstrings:
        skipped |= {id(node.value) for node in nodes_of(file) if isinstance(node, ast.Expr)}
    found: list[str] = []
    for node in nodes_of(file):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(v.value if isinstance(v, ast.Constant) else HOLE for v in node.values))  # pyright: ignore
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            found.append(node.value)
    return tuple(found)


def commands_in(text: str) -> Iterator[str]:
    """What follows `agl ` in a text, or the name by which it is called here, up to where the sentence goes on."""
    called = rf"(?:\bagl|(?:^|(?<=  )){HOLE}) (?=(?:{'|'.join(commands())})\b)|\bagl (?=[a-z])"
    for found in re.finditer(called, text, flags=re.MULTILINE):
        rest = text[found.end() :]
        quote = "`" if text[: found.start()].endswith("`") else None
        yield re.split(re.escape(quote) if quote else r"[`\n)]|[.,:;?](?=\s|$)|  ", rest)[0].strip()


@cache
def commands() -> Mapping[str, Any]:
    root: Any = typer.main.get_command(app)
    return root.commands


def check(command: str) -> None:
    """Fails for a command or an option that there is not."""
    words = shlex.split(command.replace("'", "").replace('"', ""))
    assert words[0] in commands(), f"there is no command {words[0]!r}"
    found = commands()[words.pop(0)]
    if words and words[0] in getattr(found, "commands", {}):
        found = found.commands[words.pop(0)]
    elif hasattr(found, "commands") and words and words[0].isalpha() and words[0].islower():
        return  # the sentence goes on, as in "agl store serves …"
    given = [word for word in words if word != HOLE]
    values = {option for p in found.params for option in p.opts if not getattr(p, "is_flag", False)}
    if given and given[-1] in values:
        given.append("VALUE")
    with found.make_context("agl", [], resilient_parsing=True) as context:
        context.resilient_parsing = False  # it let pass what is unknown
        found.make_parser(context).parse_args(args=given)


@cache
def advised() -> list[tuple[str, str]]:
    """The files and the commands that their texts name."""
    return sorted({(f.relative_to(PACKAGE).as_posix(), c) for f in files() for t in texts(f) for c in commands_in(t)})


def test_there_is_much_advice() -> None:
    assert len(advised()) > 50
    assert {command.split()[0] for _, command in advised()} >= {"train", "why", "show", "eval", "serve", "doctor"}


def test_every_command_that_is_advised_is_understood() -> None:
    wrong: list[str] = []
    for file, command in advised():
        try:
            check(command)
        except (Exception, AssertionError) as error:
            wrong.append(f"{file}: agl {command}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("wrong", ["sail runs/a", "train --taks FILE", "eval RUN --weights X", "store prune --elder 3"])
def test_the_check_finds_what_cannot_be_typed(wrong: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Typer keeps its errors to itself
        check(wrong)
    assert type(caught.value).__name__ in ("AssertionError", "NoSuchOption")


def test_every_name_of_the_package_that_a_text_says_exists() -> None:
    said = {name.rstrip(".") for f in files() for t in texts(f, docstrings=True) for name in _NAME.findall(t)}
    assert len(said) > 30
    assert not [name for name in sorted(said) if not exists(name)]


_NAME = re.compile(r"\bagl(?:\.\w+)+")


def exists(name: str) -> bool:
    found: Any = agl
    for part in name.split(".")[1:]:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def calls_in(text: str) -> Iterator[tuple[str, list[str]]]:
    """The calls of public names in a text with the names of their arguments, as in `Trainer(algorithm=…)`."""
    for found in re.finditer(r"\b([A-Za-z_]\w*)\(", text):
        depth, names, rest = 1, [], text[found.end() :]
        for token in re.finditer(r"[(\[{]|[)\]}]|\b([a-z_]\w*)=(?!=)", rest):
            depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(token[0], 0)
            if depth == 0:
                break
            if token[1] and depth == 1:
                names.append(token[1])
        yield found[1], names


def test_every_argument_that_is_advised_is_taken() -> None:
    ours = [file for file in files() if file.name != "frameworks.py"]  # whose lines tests/first_day compares
    calls = {(n, a) for f in ours for t in texts(f) for n, names in calls_in(t) for a in names if hasattr(agl, n)}
    assert len(calls) > 20
    assert not [f"{name}({argument}=)" for name, argument in sorted(calls) if not is_taken(name, argument)]


def is_taken(name: str, argument: str) -> bool:
    parameters = inspect.signature(getattr(agl, name)).parameters
    taken = {*parameters, *getattr(getattr(agl, name), "model_fields", {})}
    return argument in taken or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


@pytest.mark.parametrize("kind", ["page", "variable"])
def test_pages_and_variables_that_are_named_exist(kind: str) -> None:
    documented = "\n".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    for file in files():
        for text in texts(file):
            for page in re.findall(r"\bdocs/[\w./-]+\.md\b", text) if kind == "page" else ():
                assert (ROOT / page).is_file(), f"{file}: {page}"
            for variable in re.findall(r"\bAGL_[A-Z_]+[A-Z]\b(?==)", text) if kind == "variable" else ():
                assert variable in documented, f"{file}: {variable} stands on no page"


def every_error() -> list[type[errors.AgentLightningError]]:
    found, waiting = [], [errors.AgentLightningError]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting += kind.__subclasses__()
    return sorted((k for k in found if k.__module__.startswith("agentlightning")), key=lambda k: k.__qualname__)


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__qualname__)
def test_every_kind_of_error_is_explained(kind: type[errors.AgentLightningError]) -> None:
    assert (kind.__doc__ or "").strip().endswith(".")
    if kind.__module__ == errors.__name__:
        assert re.search(rf"\b{kind.__name__}\b", errors.__doc__ or ""), "it stands in the tree of the module"


def raised() -> Iterator[tuple[str, int, str]]:
    """The message of every error of ours that is raised with a text of its own, by file and line."""
    names = {kind.__name__ for kind in every_error()}
    for file in files():
        for node in nodes_of(file):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in names:
                continue
            for argument in node.args[:1]:
                if isinstance(argument, ast.JoinedStr):
                    text = "".join(v.value if isinstance(v, ast.Constant) else HOLE for v in argument.values)  # pyright: ignore
                    yield file.relative_to(PACKAGE).as_posix(), node.lineno, text
                elif isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield file.relative_to(PACKAGE).as_posix(), node.lineno, argument.value


def test_every_message_is_a_sentence() -> None:
    """It begins as one and ends as one, or in what is put in, or in something to type."""
    reasons = "learner/tree_attention.py"  # that stand in others' sentences
    found = [one for one in raised() if one[0] != reasons]
    assert len(found) > 300
    for file, line, text in found:
        where = f"{file}:{line}: {text}"
        assert re.match(rf"[\w{HOLE}'\"`(/*-]", text), where
        assert re.search(rf"([.!?{HOLE})]|  \S.*|: [a-z]+ .*)$", text), where
        assert len(text) < 900, where
