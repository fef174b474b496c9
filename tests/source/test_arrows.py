"""Imports point one way. Walks every import of the package, at module level and inside functions, and fails on an arrow
that points back; heavy packages (torch, …) may be imported at module level only where computing is done.

A new top-level package needs one line in `LAYERS`; an arrow between two packages of one layer needs one in `SIBLINGS`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

from tests.source.trees import PACKAGE, nodes_of, package_files, tree_of

ROOT = PACKAGE

LAYERS: list[set[str]] = [
    {
        "types",
        "arguments",
        "other_names",
        "frames",
        "importing",
        "installation",
        "variables",
        "errors",
        "terminal",
        "console",
        "keys",
        "lazy",
        "files",
        "reading",
    },
    {"net", "tokenizer_growth"},
    {"store", "adapter", "learner", "metrics", "models", "rendering"},
    {"gateway", "tracer", "emitter", "engine", "backend", "litagent"},
    {"runner"},
    {"algorithm"},
    {"environments", "doctor"},
    {"dashboard"},
    {"trainer"},
    {"finetuning"},
    {"cli"},
    # Older names lead to everything below; nothing below knows of them.
    {"compat"},
    # The package's own front door (lazy exports) and the examples it ships: above everything, imported by nothing.
    {"__init__", "__main__", "examples"},
]
"""From the bottom up. A package may import from the layers below its own."""

SIBLINGS = {
    ("types", "errors"),
    ("types", "arguments"),
    ("arguments", "errors"),
    ("arguments", "other_names"),
    ("types", "keys"),
    ("files", "errors"),
    ("files", "keys"),
    ("terminal", "errors"),
    ("terminal", "console"),
    ("console", "errors"),
    ("console", "keys"),
    ("errors", "installation"),
    ("errors", "frames"),
    ("keys", "errors"),
    ("learner", "adapter"),
    ("metrics", "store"),
    ("learner", "models"),
    ("gateway", "engine"),
    ("backend", "engine"),
    ("emitter", "tracer"),
    ("litagent", "emitter"),
    ("litagent", "tracer"),
}
"""Arrows inside a layer that are meant to be. In particular engine and learner do not know each other."""

FORBIDDEN = {("engine", "learner"), ("learner", "engine")}
"""Arrows that the layers would allow and that still must not be: only a backend knows both."""

HEAVY_HOMES = {
    "numpy": {"types", "engine", "learner", "backend"},
    "torch": {"engine", "learner", "backend"},
    "transformers": {"engine", "learner", "backend"},
    "peft": {"learner", "backend"},
    "safetensors": {"engine", "learner", "backend"},
    "renderers": {"rendering"},
    "openai": set(),
    "matplotlib": set(),
    "vllm": set(),
    "ray": set(),
    "verl": {"learner"},
    "tensordict": {"learner"},
}
"""Where a heavy package may be imported at module level; inside functions it may be imported anywhere."""


@dataclass(frozen=True)
class Import:
    """One imported module, as written in `path`, line `line`."""

    path: Path
    line: int
    module: str
    lazy: bool
    """Inside a function."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.module}"


def imports_of(tree: ast.Module, path: Path) -> Iterator[Import]:
    """Every import in a file of the package; `path` is relative to the directory that holds the package."""
    package = list(path.with_suffix("").parts)[:-1]
    front_doors = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "agentlightning"
    }

    def modules(node: ast.AST) -> list[str]:
        match node:
            case ast.Import():
                # `import agentlightning` alone is no arrow (it may be for `__file__`): what is used of it counts.
                return [alias.name for alias in node.names if alias.name != "agentlightning"]
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in front_doors:
                return [f"agentlightning.{attribute}"]
            case ast.ImportFrom():
                base = package[: len(package) - node.level + 1] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                # `from agentlightning import x`: x is a module of the package, or a lazy export (then it is not found).
                return [f"{module}.{alias.name}" for alias in node.names] if module == "agentlightning" else [module]
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                return [name]
            case _:
                return []

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            for module in modules(child):
                yield Import(path, child.lineno, module, lazy)  # pyright: ignore[reportAttributeAccessIssue]
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, lazy or inside)

    yield from walk(tree, False)


def layer_of(package: str) -> int:
    for index, layer in enumerate(LAYERS):
        if package in layer:
            return index
    raise AssertionError(f"agentlightning/{package} has no place yet: add it to LAYERS in {Path(__file__).name}")


def owner(path: Path) -> str:
    """The package directly under agentlightning that a file belongs to: gateway, trainer, …"""
    return path.parts[1] if len(path.parts) > 2 else path.stem


def complaint(found: Import) -> str | None:
    """What is wrong with an import, if anything is."""
    source = owner(found.path)
    root, _, rest = found.module.partition(".")
    if root != "agentlightning":
        homes = HEAVY_HOMES.get(root)
        if homes is None or found.lazy or source in homes:
            return None
        return f"{found}: {root} is heavy; import it inside the function that needs it"
    if rest.startswith("__"):  # `__version__`, `__file__`: there before anything else is imported
        return None
    target = rest.split(".")[0] or "__init__"
    if not (ROOT / target).is_dir() and not (ROOT / f"{target}.py").exists():
        target = "__init__"
    if target == source or (source, target) in SIBLINGS:
        return None
    if (source, target) in FORBIDDEN:
        return f"{found}: {source} and {target} do not know each other"
    if layer_of(target) < layer_of(source):
        return None
    return f"{found}: the arrow {source} → {target} points back"


def complaints_about(source: str | ast.Module, path: str) -> list[str]:
    """What the check says of a file with this source at this place."""
    tree = ast.parse(source) if isinstance(source, str) else source
    found = (complaint(i) for i in imports_of(tree, Path(path)))
    return [text for text in found if text]


def test_imports_point_one_way() -> None:
    files = package_files()
    assert len(files) > 20, files
    problems: list[str] = []
    for path in files:
        problems += complaints_about(tree_of(path), str(path.relative_to(ROOT.parent)))
    assert not problems, "\n" + "\n".join(problems)


def _imported(path: Path, modules: Mapping[str, Path]) -> set[str]:
    """Those of the modules that a file imports, however it is written: `from package import module`, too."""
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            full = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in full.values()}
    return found & {*modules}


def test_no_two_modules_import_each_other() -> None:
    """Also not by way of others, inside functions, or for type checkers alone."""
    files = {path.relative_to(ROOT.parent): path for path in package_files()}
    modules = {".".join(short.with_suffix("").parts).removesuffix(".__init__"): path for short, path in files.items()}
    del modules["agentlightning"]  # its exports are lazy
    graph = {name: _imported(path, modules) - {name} for name, path in modules.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError with the modules


def test_every_package_has_a_layer() -> None:
    for path in package_files():
        layer_of(owner(path.relative_to(ROOT.parent)))


def test_a_back_arrow_is_caught_however_it_is_written() -> None:
    for line in (
        "from agentlightning.runner.loop import Runner",
        "import agentlightning.runner",
        "from agentlightning import runner",
        "from ..runner import loop",
        "def f():\n    from agentlightning.runner import loop",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from agentlightning.runner import loop",
        "import importlib\nimportlib.import_module('agentlightning.runner')",
        "from agentlightning import Trainer",
        "import agentlightning as agl\nagl.Trainer",
    ):
        assert len(complaints_about(line, "agentlightning/store/x.py")) == 1, line


def test_a_forward_arrow_is_allowed() -> None:
    assert complaints_about("from agentlightning.store.base import UNSET", "agentlightning/runner/x.py") == []
    assert complaints_about("from ..types import Span", "agentlightning/store/x.py") == []
    assert complaints_about("from agentlightning.runner import loop", "agentlightning/trainer.py") == []
    assert complaints_about("import agentlightning\nagentlightning.__file__", "agentlightning/store/x.py") == []


def test_siblings_do_not_know_each_other_unless_listed() -> None:
    assert complaints_about("import agentlightning.learner", "agentlightning/engine/x.py")
    assert complaints_about("import agentlightning.engine", "agentlightning/learner/x.py")
    assert complaints_about("import agentlightning.tracer", "agentlightning/gateway/x.py")
    assert not complaints_about("import agentlightning.engine.base", "agentlightning/backend/x.py")


def test_heavy_packages_stay_home() -> None:
    assert complaints_about("import torch", "agentlightning/gateway/x.py")
    assert complaints_about("from transformers import AutoTokenizer", "agentlightning/cli/x.py")
    assert not complaints_about("def f():\n    import torch", "agentlightning/gateway/x.py")
    assert not complaints_about("import torch", "agentlightning/learner/x.py")
