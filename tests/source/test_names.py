"""A class has a name of its own in the whole package: whoever meets it knows which one is meant."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
from collections import defaultdict
from pathlib import Path

import agentlightning
from agentlightning.types.finding import counted
from tests.source.trees import nodes_of, package_files, trees


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


PACKAGE = Path(agentlightning.__file__).parent
IN_A_TABLE = re.compile(r"(?:^|\s{3,})([a-z_]+)/?\s{2,}(?=\S)", re.MULTILINE)
"""A name in a package's table of its files: at the beginning of a line, or behind the text of another one."""


def _is_module(folder: Path, name: str) -> bool:
    return (folder / name).is_dir() or (folder / f"{name}.py").is_file()


def test_a_packages_table_of_its_files_names_files() -> None:
    named = {
        (file, name)
        for file, tree in trees().items()
        if Path(file).name == "__init__.py"
        for name in IN_A_TABLE.findall(ast.get_docstring(tree) or "")
    }
    assert len(named) > 50
    assert {one for one in named if not _is_module(PACKAGE / Path(one[0]).parent, one[1])} == set()


def test_a_module_that_a_docstring_refers_to_by_its_package_is_there() -> None:
    """`package.module` or `package.module.Name`, by names that only packages have."""
    packages = {folder.name: folder for folder in PACKAGE.rglob("*") if (folder / "__init__.py").is_file()}
    gone = {
        (file, name)
        for file in trees()
        for name in re.findall(r"`([a-z_]+\.[a-z_]+)\.[A-Z]\w+`", (PACKAGE / file).read_text())
        for package, module in [name.split(".")]
        if package in packages and not _is_module(packages[package], module)
    }
    assert gone == set()


def test_a_count_bends_its_noun() -> None:
    """`{len(found)} rollouts` is "1 rollouts" of one; `counted` bends it. A few are always several."""
    noun = re.compile(r" (\w+ )?(rollouts|tasks|steps|calls|groups|conversations|errors|runs|rounds|arguments)\b")
    several = {"in_calls.py", "in_rollouts.py", "in_steps.py", "verdicts.py", "demonstrations.py"}
    wrong = [
        f"{file.relative_to(PACKAGE)}:{count.lineno}"
        for file in package_files()
        if file.name not in several
        for node in nodes_of(file)
        if isinstance(node, ast.JoinedStr)
        for count, after in itertools.pairwise(node.values)
        if isinstance(count, ast.FormattedValue) and ast.unparse(count.value).startswith("len(")
        if isinstance(after, ast.Constant) and noun.match(str(after.value))
    ]
    assert wrong == []
    assert [counted(n, "call is", "calls are") for n in (0, 1, 2000)] == ["0 calls are", "1 call is", "2,000 calls are"]
    assert [counted(n, "rollout") for n in (0, 1, 2)] == ["0 rollouts", "1 rollout", "2 rollouts"]


def test_programs_in_strings_import_what_there_is() -> None:
    """Those of tests that seldom run: a node of Kubernetes, a cluster. Tests of wrong names are left out."""
    imports = re.compile(r"^\s*from (agentlightning[\w.]*) import ([\w, ]+)$", re.MULTILINE)
    absent, seen = [], 0
    for folder in ("backend", "e2e", "environments", "gateway", "litagent", "runner", "store", "trainer"):
        for path in sorted((Path(__file__).parents[1] / folder).rglob("test_*.py")):
            strings = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
            for module, names in imports.findall("\n".join(s for s in strings if isinstance(s, str))):
                for name in (name.split(" as ")[0].strip() for name in names.split(",")):
                    seen += 1
                    found = hasattr(importlib.import_module(module), name)
                    if not found and importlib.util.find_spec(f"{module}.{name}") is None:
                        absent.append(f"{path.name}: {module}.{name}")
    assert absent == []
    assert seen > 30
