"""Names that packages load when they are used: each stub's names exist, and are what the stub says they are."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import agentlightning
from agentlightning import lazy

ROOT = Path(agentlightning.__file__).parent
PACKAGES = sorted(".".join(stub.parent.relative_to(ROOT.parent).parts) for stub in ROOT.rglob("__init__.pyi"))
MODULES = {("agentlightning", "metrics")}
"""Names that are modules."""


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_of_a_stub_is_there(package: str) -> None:
    module = importlib.import_module(package)
    names = [name for name in module.__all__ if name != "__version__"]
    assert len(names) > 1
    assert set(names) <= set(dir(module))
    for name in names:
        assert getattr(module, name) is getattr(module, name)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_submodule_takes_the_place_of_a_name(package: str) -> None:
    """Once it was imported, a submodule is an attribute of its package, and nothing is loaded in its place."""
    folder = ROOT.parent.joinpath(*package.split("."))
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    names = set(importlib.import_module(package).__all__)
    assert {(package, name) for name in modules & names} <= MODULES


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    load, names, _ = lazy.attach("agentlightning.gateway")
    assert "Gateway" in names()
    with pytest.raises(AttributeError, match=r"'agentlightning\.gateway' has no attribute 'gatway'"):
        load("gatway")


@pytest.mark.parametrize("package", [p for p in PACKAGES if p != "agentlightning"])
def test_a_package_alone_loads_none_of_its_names(package: str) -> None:
    code = f"import sys, {package}; print([m for m in sys.modules if m.startswith('{package}.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
