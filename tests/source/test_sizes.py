"""How long functions and files are: what CONTRIBUTING.md says of them is so, but for those listed here."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.source.trees import trees

LINES_OF_A_FUNCTION, LINES_OF_A_FILE = 40, 500
"""At most. Of a function its signature and docstring do not count."""
LONGER = {
    "gateway/gateway.py: __init__",  # wire what was given
    "store/database/migrations/versions/0001_the_first_schema.py: upgrade",
    "engine/torch_engine.py",
}


def _long(name: str, tree: ast.Module) -> Iterator[str]:
    if tree.body and (tree.body[-1].end_lineno or 0) > LINES_OF_A_FILE:
        yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if first and (node.end_lineno or 0) - first[0].lineno + 1 > LINES_OF_A_FUNCTION:
                yield f"{name}: {node.name}"


def test_functions_fit_on_a_screen_and_files_in_a_head() -> None:
    assert {long for name, tree in trees().items() for long in _long(name, tree)} == LONGER, (
        "a shorter one leaves the list"
    )


def test_what_a_module_does_as_a_program_stands_at_its_end() -> None:
    """What follows it does not exist yet when the program runs."""
    early = [
        name
        for name, tree in trees().items()
        if any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body[:-1])
    ]
    assert early == []
