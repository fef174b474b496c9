"""The package's modules as syntax trees, parsed once for all tests that look at how it is written."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "agentlightning"


@cache
def trees() -> dict[str, ast.Module]:
    """By their paths in the package."""
    return {
        str(file.relative_to(PACKAGE)): ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py")
    }
