"""Names of a package that are loaded when they are used.

The stub beside a package's `__init__.py` says each of them once, for type checkers and for the package itself:
`from agentlightning.errors import ConfigError as ConfigError`.
"""

from __future__ import annotations

import ast
import pkgutil
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The package's `__getattr__`, `__dir__` and `__all__`, of what its stub imports `as` a name."""
    homes = _homes(package)

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, its_name = homes[name]
        value = import_module(f"{package}.{name}") if module == package else getattr(import_module(module), its_name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(homes), sorted(homes)


def _homes(package: str) -> dict[str, tuple[str, str]]:
    stub = pkgutil.get_data(package, "__init__.pyi")
    if stub is None:
        raise ImportError(f"The stub of {package} is not installed.")
    found = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom) and node.module]
    return {name.asname: (str(node.module), name.name) for node in found for name in node.names if name.asname}
