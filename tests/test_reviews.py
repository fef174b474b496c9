"""The reviews in docs/security.md, kept true: what makes a server, or makes code of a name, stands there by its file.

A new place of either kind fails here until it is looked at and has its line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text()
SERVERS = {
    "LoopServer",
    "create_server",
    "start_server",
    "start_unix_server",
    "start_tls",
    "HTTPServer",
    "ThreadingHTTPServer",
    "TCPServer",
    "UnixStreamServer",
    "TCPSite",
    "AppRunner",
    "run_app",
    "Server",
    "Config",
    "listen",
}
CODE = {
    "import_module",
    "__import__",
    "exec",
    "eval",
    "run_path",
    "run_module",
    "spec_from_file_location",
    "entry_points",
    "resolve_name",
    "unsafe_load",
    "full_load",
}
UNPICKLES = {"pickle", "cloudpickle", "marshal", "dill", "joblib", "shelve"}
SECTIONS = {"servers": "## What listens", "code": "## Where a name becomes code"}


def calls(tree: ast.AST) -> Iterator[tuple[str, str, ast.Call]]:
    """Each call: what it is called on, by the last word of that, and its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield "", node.func.id, node
            elif isinstance(node.func, ast.Attribute):
                on = node.func.value
                yield on.id if isinstance(on, ast.Name) else getattr(on, "attr", ""), node.func.attr, node


def makes_a_server(on: str, name: str, call: ast.Call) -> bool:
    if name in ("Server", "Config"):
        return on == "uvicorn"
    if name == "listen":
        return on not in ("event", "sa")
    return name in SERVERS


def makes_code(on: str, name: str, call: ast.Call) -> bool:
    if name in ("load", "loads", "Unpickler"):
        keywords = {keyword.arg for keyword in call.keywords}
        return (
            on in UNPICKLES or (on == "yaml" and name == "load") or (on == "torch" and "weights_only" not in keywords)
        )
    if name in ("exec", "eval"):
        return on == ""
    return name in CODE


def found(kind: str) -> set[str]:
    """The files that hold such a place."""
    fits = makes_a_server if kind == "servers" else makes_code
    files = [file for package in ("agentlightning", "agent_lightning") for file in (ROOT / package).rglob("*.py")]
    return {
        str(file.relative_to(ROOT))
        for file in files
        if any(fits(*call) for call in calls(ast.parse(file.read_text(encoding="utf-8"))))
    }


def listed(kind: str) -> set[str]:
    section = PAGE.split(SECTIONS[kind])[1].split("\n## ")[0]
    return set(re.findall(r"`(agent_?lightning/[\w/.]+\.py)`", section))


@pytest.mark.parametrize("kind", SECTIONS)
def test_every_place_is_in_the_review(kind: str) -> None:
    assert found(kind) == listed(kind)


def test_the_search_finds_what_it_is_for() -> None:
    code = "importlib.import_module(x)\nexec(x)\npickle.loads(x)\ntorch.load(x)\nyaml.load(x)\nrunpy.run_path(x)\n"
    assert [makes_code(*call) for call in calls(ast.parse(code))] == [True] * 6
    harmless = "torch.load(x, weights_only=True)\njson.loads(x)\nmodel.eval()\nsession.exec(x)\n"
    assert not any(makes_code(*call) for call in calls(ast.parse(harmless)))
    server = "LoopServer(a)\nuvicorn.Server(c)\nasyncio.start_server(f)\nsocket.create_server(a)\nsock.listen()\n"
    assert [makes_a_server(*call) for call in calls(ast.parse(server))] == [True] * 5


def test_all_that_speaks_http_has_the_guard_in_front() -> None:
    """uvicorn is run in one place, and there nothing but a Guard is run by it."""
    using = [
        f for f in (ROOT / "agentlightning").rglob("*.py") if re.search(r"^(import|from) uvicorn", f.read_text(), re.M)
    ]
    assert [str(file.relative_to(ROOT)) for file in using] == ["agentlightning/net/server.py"]
    tree = ast.parse(using[0].read_text())
    (server,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "LoopServer"]
    kept = [
        ast.unparse(node.value)
        for node in ast.walk(server)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self._app"
    ]
    assert kept == ["Guard(app, host, allow_hosts, forms=forms)"]


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:tests|scripts|benchmarks)/[\w/.]+\.py)`", PAGE))))
def test_what_the_page_names_is_there(path: str) -> None:
    assert (ROOT / path).is_file()
