"""Finding the examples: inside the installed package, or beside it in a checkout."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import itertools
import re
import sys
import traceback
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

from agentlightning.arguments import explained
from agentlightning.errors import ConfigError, missing_extra
from agentlightning.frames import is_library, is_own
from agentlightning.importing import MAIN_GUARD, loading
from agentlightning.installation import pip_command
from agentlightning.litagent import LitAgent
from agentlightning.runner.endings import GATEWAY_AT_IMPORT, OWN_KEY, hint_for
from agentlightning.runner.frameworks import in_its_words
from agentlightning.trainer.checks import as_agent, of_a_framework

_PACKAGE = Path(__file__).parent.parent
_PLACES = (_PACKAGE / "examples", _PACKAGE.parent / "examples")


def example_dir(name: str, module: str = "recipe") -> Path:
    """The folder of an example that has this module. Raises ConfigError with the names there are."""
    for place in _PLACES:
        if (place / name / f"{module}.py").is_file():
            return place / name
    known = sorted({folder.name for folder in example_dirs(module)})
    raise ConfigError(f"There is no example '{name}' that runs by itself. There is: {', '.join(known)}.")


def example_dirs(module: str = "recipe") -> list[Path]:
    """The folders of all examples that have this module, by name."""
    found = {f.parent.name: f.parent for place in reversed(_PLACES) for f in place.glob(f"*/{module}.py")}
    return [found[name] for name in sorted(found)]


@explained
def load_example(name: str, module: str) -> ModuleType:
    """A module of an example, as part of the package `agl_example_{name}`."""
    package = f"agl_example_{name}"
    if package not in sys.modules:
        _load_package(package, example_dir(name, module))
    try:
        return import_module(f"{package}.{module}")
    except ModuleNotFoundError as error:
        needs = example_dir(name, module) / "requirements.txt"
        if needs.is_file():
            raise ConfigError(
                f"The example '{name}' needs the package '{error.name}'. Install what it needs with:  "
                f"{pip_command()} install -r {needs}"
            ) from error
        raise missing_extra("torch", error.name or "openai") from error


def _load_package(package: str, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        package, folder.resolve() / "__init__.py", submodule_search_locations=[str(folder.resolve())]
    )
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[package] = loaded
    spec.loader.exec_module(loaded)


def load_agent(reference: str) -> LitAgent[Any]:
    """The agent named by `path/to/file.py:name`. Raises ConfigError that says what is missing."""
    file, _, name = reference.rpartition(":")
    path = Path(file).expanduser()
    if not file or not path.is_file():
        raise ConfigError(f"'{reference}' names no agent: give path/to/file.py:name of a function or a LitAgent.")
    if (taken := _taken(path)) is not None:
        raise ConfigError(f"{path} has the name of {taken}, which it would hide: give the file another name.")
    try:
        with loading(path):
            module = _load_file(path)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise ConfigError(f"{path} cannot be loaded: {_what_it_raised(error)}{_mended(error, path)}") from error
    found = vars(module).get(name)
    if found is None:
        known = [
            n for n, v in vars(module).items() if (callable(v) or isinstance(v, LitAgent)) and not n.startswith("_")
        ]
        meant = difflib.get_close_matches(name, known, n=1)
        hint = _inside(path, name) or (f" Did you mean {meant[0]!r}?" if meant else "")
        raise ConfigError(f"{path} has no '{name}' at its top level.{hint}")
    if isinstance(found, type) and issubclass(found, LitAgent):
        found = _made(found, reference)
    if not callable(found) and not isinstance(found, LitAgent):
        is_it = of_a_framework(found) or f"{found!r:.60}, and an agent is a function or a LitAgent."
        raise ConfigError(f"{reference} is {is_it}")
    return as_agent(found)


def _made(kind: type[LitAgent[Any]], reference: str) -> LitAgent[Any]:
    """An object of a class that the file has in place of one. Raises ConfigError where it cannot be made like this."""
    name = kind.__name__
    make = f"Make the object in the file, agent = {name}(…), and give {reference.rpartition(':')[0]}:agent."
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise ConfigError(f"{reference} is a class, and {name}() wants more: {error}. {make}") from None
    try:
        return kind()
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's class raises
        raise ConfigError(f"{name}() of {reference} cannot be made: {_what_it_raised(error)}") from error


def _inside(path: Path, name: str) -> str:
    """Where a file defines this name below its top level; nothing where it does not."""
    defined = [
        node
        for node in ast.walk(ast.parse(path.read_bytes()))
        if getattr(node, "name", None) == name
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name)
    ]
    lines = [node.lineno for node in defined if isinstance(node, ast.stmt | ast.expr)]
    return f" Line {lines[0]} defines it, indented: move it out of the block that it stands in." if lines else ""


def agents_in(path: Path) -> list[str]:
    """The names of the functions under @rollout, and of the LitAgents, at the top of a file that is not run for it."""
    try:
        nodes = ast.parse(path.read_bytes()).body
    except (OSError, ValueError, SyntaxError):
        return []
    named = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    marks = {n.name: [*n.decorator_list, *(n.bases if isinstance(n, ast.ClassDef) else ())] for n in named}
    ours = re.compile(r"\b(rollout|LitAgent)\b")
    return [name for name, found in marks.items() if any(ours.search(ast.unparse(each)) for each in found)]


_DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.Constant)


def only_defines(path: Path) -> bool:
    """Whether a file that `agents_in` read does nothing when it is run: it imports, defines, and calls nothing of its
    own."""
    nodes = ast.parse(path.read_bytes()).body
    own = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    calls = (c.func for n in nodes if isinstance(n, ast.Assign) for c in ast.walk(n.value) if isinstance(c, ast.Call))
    if any(isinstance(function, ast.Name) and function.id in own for function in calls):
        return False
    return all(isinstance(n.value if isinstance(n, ast.Expr) else n, _DEFINES) for n in nodes)


def _load_file(path: Path) -> ModuleType:
    """The file as a module of its own; one with relative imports as part of the package that its folder is."""
    sys.path.insert(0, str(path.parent.resolve()))
    if (path.parent / "__init__.py").is_file() and re.search(r"^\s*from \.", path.read_text(), flags=re.MULTILINE):
        folder = path.parent.resolve()
        package = f"agl_package_{folder.name}_{crc32(str(folder).encode()):08x}"
        if package not in sys.modules:
            _load_package(package, folder)
        return import_module(f"{package}.{path.stem}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _mended(error: BaseException, path: Path) -> str:
    """What to do about it, where that is known."""
    if isinstance(error, SystemExit):
        return f"\nIt ends the program when it is imported: put that under  {MAIN_GUARD}"
    if isinstance(error, ImportError) and "attempted relative import" in str(error):
        return (
            f"\nRelative imports are for packages: put an empty __init__.py into {path.parent.resolve()}, or import "
            "without the dot, as its folder is on the path."
        )
    if (hidden := _hidden_package(error, path.parent)) is not None:
        own = path.parent / f"{hidden}.py"
        return f"\nYour own {own} is found in place of the package '{hidden}': give the file another name."
    if isinstance(error, ModuleNotFoundError):
        return f"\nInstall it into this environment:  {pip_command()} install …"
    hint = hint_for(error)
    return f"\n{GATEWAY_AT_IMPORT if hint == OWN_KEY else ''}{in_its_words(hint, error)}" if hint else ""


def _hidden_package(error: BaseException, folder: Path) -> str | None:
    """The package whose name a file of the user's has taken, where that is what the error comes from."""
    module = getattr(error, "obj", None)
    full = error.name if isinstance(error, ImportError) else module.__name__ if isinstance(module, ModuleType) else None
    name = (full or "").partition(".")[0]
    if not (folder / f"{name}.py").is_file():
        return None
    other_paths = [place for place in sys.path if Path(place).resolve() != folder.resolve()]
    there = name in sys.stdlib_module_names or PathFinder.find_spec(name, other_paths) is not None
    return name if there else None


def _taken(path: Path) -> str | None:
    """The module whose name the file has, in words: one of Python, this package, or an installed one in use."""
    if path.stem in sys.stdlib_module_names:
        return f"Python's module '{path.stem}'"
    file = getattr(sys.modules.get(path.stem), "__file__", None) or ""
    known = path.stem == _PACKAGE.name or is_library(file)
    return f"the package '{path.stem}'" if known and Path(file).resolve() != path.resolve() else None


def _what_it_raised(error: BaseException) -> str:
    """The error with its way through the user's own files, or where there is none, from the first file on."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    way = [*itertools.dropwhile(lambda frame: frame.filename.startswith("<frozen"), frames)]
    own = [frame for frame in way if is_own(frame.filename)] or way
    return "".join([*traceback.format_exception_only(error), *traceback.format_list(own)]).rstrip()
