"""docs/diagnosis.md explains every code there is, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from agentlightning import algorithm, doctor
from agentlightning.doctor.breaks import ADVICE

ROOT = Path(__file__).parents[2]
_MAKERS = {"problem", "warning", "note"}


def codes_in(source: str) -> Iterator[str]:
    """The codes that a file's findings are made with: first arguments of their makers, and words given to `code`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str(code)), *_]) if name in _MAKERS:
                yield code
            case ast.Call(func=ast.IfExp(), args=[ast.Constant(value=str(code)), *_]):
                yield code
            case ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id="code"), *_])], value=ast.Tuple(elts=[first, *_])):
                yield ast.literal_eval(first)
            case _:
                pass


def test_every_code_is_explained() -> None:
    files = [file for package in (doctor, algorithm) for file in Path(package.__path__[0]).rglob("*.py")]
    made = {code for file in files for code in codes_in(file.read_text())}
    made |= {f"prefix_break_{cause}" for cause in ADVICE}
    text = (ROOT / "docs" / "diagnosis.md").read_text()
    assert made == set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE))
