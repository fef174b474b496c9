"""The reviews in docs/security.md, kept true: what makes a server, or makes code of a name, stands there by its file.

A new place of either kind fails here until it is looked at and has its line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import pytest

from tests.source.trees import PACKAGE, ROOT, installed_files, nodes_of

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


def calls(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str, ast.Call]]:
    """Each call: what it is called on, by the last word of that, and its name."""
    for node in nodes:
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
    return {
        str(file.relative_to(ROOT)) for file in installed_files() if any(fits(*call) for call in calls(nodes_of(file)))
    }


def listed(kind: str) -> set[str]:
    section = PAGE.split(SECTIONS[kind])[1].split("\n## ")[0]
    return set(re.findall(r"`(agent_?lightning/[\w/.]+\.py)`", section))


@pytest.mark.parametrize("kind", SECTIONS)
def test_every_place_is_in_the_review(kind: str) -> None:
    assert found(kind) == listed(kind)


def test_the_search_finds_what_it_is_for() -> None:
    code = "importlib.import_module(x)\nexec(x)\npickle.loads(x)\ntorch.load(x)\nyaml.load(x)\nrunpy.run_path(x)\n"
    assert [makes_code(*call) for call in calls(ast.walk(ast.parse(code)))] == [True] * 6
    harmless = "torch.load(x, weights_only=True)\njson.loads(x)\nmodel.eval()\nsession.exec(x)\n"
    assert not any(makes_code(*call) for call in calls(ast.walk(ast.parse(harmless))))
    server = "LoopServer(a)\nuvicorn.Server(c)\nasyncio.start_server(f)\nsocket.create_server(a)\nsock.listen()\n"
    assert [makes_a_server(*call) for call in calls(ast.walk(ast.parse(server)))] == [True] * 5


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


def test_everything_that_listens_is_a_loop_server() -> None:
    """There is one place that opens a server's socket, so there is none without the guard; the server of OpenEnv, which
    runs in an interpreter without our package, has a key in front of it."""
    listening = {"uvicorn", "http.server", "socketserver", "wsgiref.simple_server", "hypercorn", "aiohttp.web"}
    found = set()
    for file in installed_files():
        for node in nodes_of(file):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
            if listening & set(names) or (isinstance(node, ast.Attribute) and node.attr == "start_server"):
                found.add(file)
    assert found == {PACKAGE / "net/server.py", PACKAGE / "environments/workers/openenv_server.py"}
