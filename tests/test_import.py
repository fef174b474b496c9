"""`import agentlightning` is cheap and needs none of the heavy packages, installed or not."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "openai", "peft", "renderers", "safetensors", "matplotlib", "sqlalchemy", "fastapi")

PROBE = """
import json, sys, time
for name in json.loads(sys.argv[1]):
    sys.modules[name] = None  # importing it raises ImportError, as if it were not installed
before = set(sys.modules)
began = time.perf_counter()
import agentlightning
seconds = time.perf_counter() - began
print(json.dumps({"seconds": seconds, "modules": sorted(set(sys.modules) - before)}))
"""


def probe(blocked: tuple[str, ...]) -> tuple[float, list[str]]:
    """Seconds and newly imported modules of `import agentlightning` in a fresh process that lacks `blocked`."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(blocked)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["seconds"], answer["modules"]


def test_import_works_without_the_heavy_packages() -> None:
    seconds, modules = probe(HEAVY)
    print(f"import agentlightning: {seconds:.3f} s, {len(modules)} modules")  # noqa: T201
    assert "agentlightning" in modules


def test_import_does_not_load_what_it_does_not_need() -> None:
    seconds, modules = probe(())
    loaded = {name.split(".")[0] for name in modules}
    assert not loaded & set(HEAVY)
    # No clock here, machines differ: what costs time is the number of modules. Names are loaded when they are used.
    assert len(modules) < 100, f"{len(modules)} modules in {seconds:.2f} s"


EVERYTHING = """
import importlib, json, pkgutil, sys
for name in json.loads(sys.argv[1]):
    sys.modules[name] = None
import agentlightning
failures = []
for module in pkgutil.walk_packages(agentlightning.__path__, "agentlightning."):
    if module.name.split(".")[1] in json.loads(sys.argv[2]) or module.name.endswith(".__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        if error.name not in ("psycopg", "weave"):  # of the extras `postgres` and `weave`
            failures.append(f"{module.name}: {error}")
print(json.dumps(failures))
"""


def test_everything_but_training_and_sampling_imports_without_torch() -> None:
    blocked = ("torch", "transformers", "peft", "safetensors", "openai", "matplotlib", "numpy", "uvloop")
    computing = ("engine", "learner", "backend", "examples")
    done = subprocess.run(
        [sys.executable, "-c", EVERYTHING, json.dumps(blocked), json.dumps(computing)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


LARGE = """
import json, sys
import agentlightning.gateway.large.work
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""


def test_the_process_for_large_requests_starts_without_the_store_and_http() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, timeout=60, check=True)
    assert not set(json.loads(done.stdout)) & {"sqlalchemy", "aiohttp", "uvicorn", "fastapi", "torch", "transformers"}


homes_of = cache(metadata.packages_distributions)


@cache
def requirements_of(name: str) -> list[str]:
    return metadata.requires(name) or []


def brought_by(requirements: Iterable[str], extras: dict[str, list[str]]) -> set[str]:
    """The names of all packages that come with these requirements, in this environment."""
    names: set[str] = set()
    left = list(requirements)
    while left:
        requirement, _, marker = left.pop().partition(";")
        found = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", requirement.strip())
        assert found is not None, requirement
        name, wanted = re.sub(r"[._]", "-", found[1].lower()), (found[2] or "").split(",")
        if name == "agentlightning":
            left += [one for extra in wanted for one in extras[extra]]
        elif "extra ==" not in marker and name not in names:
            names.add(name)
            try:
                left += requirements_of(name)
            except metadata.PackageNotFoundError:
                continue
    return names


def imported_at_once(file: Path) -> Iterator[str]:
    """The packages that importing a file imports, by their first names."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def packaged_files() -> list[Path]:
    return [file for folder in ("agentlightning", "agent_lightning") for file in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("folder", sorted({file.parent.relative_to(ROOT) for file in packaged_files()}), ids=str)
def test_what_files_import_comes_with_the_package(folder: Path) -> None:
    """Not by chance, with another package that the tests need: an extra brings what the others do not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    verl = "verl" if "verl" in str(folder) or folder.name == "learner" else "ray"
    named = [*project["dependencies"], f"agentlightning[{','.join({*extras} - {'dev', 'verl'} | {verl})}]"]
    known = brought_by(named, extras)
    homes = homes_of()
    found = {
        (str(file.relative_to(ROOT)), root)
        for file in (ROOT / folder).glob("*.py")
        for root in imported_at_once(file)
        if root not in sys.stdlib_module_names and root not in ("agentlightning", "agent_lightning")
    }
    strange = {(file, root) for file, root in found if root in homes and not known & {*map(_normal, homes[root])}}
    assert not strange


def _normal(name: str) -> str:
    return re.sub(r"[._]", "-", name.lower())
