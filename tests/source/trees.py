"""The package's modules as syntax trees, parsed once for all tests that look at how it is written."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "agentlightning"


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(file)))


@cache
def package_files() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def installed_files() -> tuple[Path, ...]:
    """With those of the package by its older name."""
    return (*package_files(), *sorted((ROOT / "agent_lightning").rglob("*.py")))


@cache
def trees() -> dict[str, ast.Module]:
    """By their paths in the package."""
    return {str(file.relative_to(PACKAGE)): tree_of(file) for file in package_files()}
