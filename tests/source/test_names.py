"""A class has a name of its own in the whole package: whoever meets it knows which one is meant."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.source.trees import trees


def test_no_two_classes_have_the_same_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for file, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


PRIVATE_WORDS = {"asked", "told", "said", "heard", "beside", "elsewhere", "away", "room"}
"""Words that say little to a stranger as the name of a variable, a function or a module."""
FIELDS_OF_RECORDS = {("gateway/exchange.py", "asked"), ("types/call.py", "asked")}
"""What a call's client asked for, and `used`: both stand in stores by these names."""


def _bound(node: ast.AST) -> str:
    """The name that a statement, an argument or a definition gives to something."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case _:
            return ""


def test_names_are_of_the_fields_words() -> None:
    found = {
        (file, name)
        for file, tree in trees().items()
        for name in (Path(file).stem, *map(_bound, ast.walk(tree)))
        if PRIVATE_WORDS & set(re.findall("[a-z]+", name.lower().replace("_", " ")))
    }
    assert found == FIELDS_OF_RECORDS
