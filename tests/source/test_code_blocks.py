"""Every block of the documentation is run, or a line says by which test it is, or why it is not: Python's here, the
commands of the others in `commands.py`.

The blocks of a page are run in order in one namespace, each up to where it would train: agents, settings and trainers
are made as they are written.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from tests.source.commands import (
    ELSEWHERE as TYPED_ELSEWHERE,
    OTHER_BLOCKS,
    PAGES as ALL_PAGES,
    SERVING,
    SEVERAL,
    SHELL,
    TYPED,
    blocks as all_blocks,
    commands,
    name_of,
)

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
ELSEWHERE = {
    "README.md": "tests/e2e/test_docs_as_typed.py",
    "first-curve.md": "tests/e2e/test_first_curve.py",
    "getting-started.md": "tests/e2e/test_docs_as_typed.py",
    "bring-your-own.md": "tests/e2e/test_pages.py",
    "one-token.md": "tests/e2e/test_pages.py",
    "from-0.3.md": "tests/e2e/test_pages.py",
    "from-1.0.md": "tests/e2e/test_pages.py",
    "from-art.md": "tests/e2e/test_pages.py",
    "from-trl.md": "tests/e2e/test_pages.py",
    "from-verifiers.md": "tests/e2e/test_pages.py",
    "choosing.md": "tests/source/test_reference.py",
}
"""Pages whose blocks another test runs, but for those that `NOT_RUN` names."""
NOT_RUN = {
    ("agents.md", "client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key)\n"): "a line of an agent",
    ("agents.md", "emit_exception"): "lines of an agent",
    ("agents.md", "find_final_reward(spans)"): "a list of what there is",
    ("agents.md", "trace_context() as trace"): "asks a model",
    ("agents.md", "get_last_trace().draw"): "asks a model",
    ("agents.md", "TracerTraceToTriplet"): "needs a store with rollouts",
    ("agents.md", "client.upload_data"): "needs a server; tests/small_client has all of it",
    ("algorithms.md", "response"): "a fragment of a client",
    ("bring-your-own.md", "held_out.jsonl"): "trains the reader's agent; the test trains that of each section",
    ("algorithms.md", "losses:proximal"): "names a module of the reader's",
    ("algorithms.md", "my_advantage"): "names a function of the reader's",
    ("configuration.md", "…"): "an outline",
    ("diagnosis.md", "store"): "needs a store with a run",
    ("extending.md", "mine"): "names a module of the reader's",
    ("fine-tuning-api.md", "import openai"): "needs a server; tests/finetuning has all of it",
    ("tinker.md", "import tinker"): "tests/finetuning/tinker/test_page.py runs it against a server",
    ("fine-tuning-api.md", '"agent": "sums"'): "needs a server; tests/finetuning has all of it",
    ("from-1.0.md", "AGL_EVENT_URL"): "the other side, whose package is not on PyPI",
    ("from-art.md", "import art"): "the other side, whose backend wants a GPU",
    ("from-trl.md", "GRPOTrainer(model="): "the other side, which needs trl",
    ("from-verifiers.md", "import verifiers"): "the other side, which needs verifiers and another trainer",
    ("gateway.md", "as_resource()"): "tests/gateway/test_url_keys.py runs it, with a store and an engine",
    ("gateway.md", "Frozen(other_engine"): "needs a store and engines",
    ("gateway.md", "MyDialect()"): "needs a store and an engine, and a dialect of the reader's",
    ("logging.md", "TensorBoard"): "needs other packages; tests/metrics has all of it",
    ("notebooks.md", "trainer.dev("): "asks a model",
    ("notebooks.md", "fit_async"): "trains",
    ("notebooks.md", "pandas"): "needs a run that was trained",
    ("store.md", "run_forever"): "serves until it is stopped",
}
"""Blocks that are not run: the page, words that only this block holds, and why."""


def blocks(page: Path) -> list[tuple[int, str]]:
    """Each block with the line that it begins at."""
    text = page.read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)), block[1]) for block in found]


def before_training(tree: ast.Module) -> ast.Module:
    """Up to the first `trainer.fit(…)`, of which `trainer` stays."""
    for number, statement in enumerate(tree.body):
        for call in (n for n in ast.walk(statement) if isinstance(n, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr == "fit":
                trainer = ast.copy_location(ast.Expr(call.func.value), statement)
                return ast.Module([*tree.body[:number], trainer], [])
    return tree


def run(page: Path, line: int, code: str, names: dict[str, Any]) -> None:
    tree = before_training(ast.parse("\n" * line + code))
    compiled = compile(tree, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if compiled.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(compiled, names))
    else:
        exec(compiled, names)


def reasons(page: Path, code: str) -> list[tuple[str, str]]:
    """The lines of the table that this block is in."""
    return [key for key in NOT_RUN if key[0] == page.name and key[1] in code]


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in ELSEWHERE], ids=lambda p: p.name)
def test_blocks_run_as_they_stand(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_API_KEY", "AGL_STORE_KEY"):
        monkeypatch.setenv(name, "a-key-of-the-reader")
    for name in ("train.jsonl", "test.jsonl"):
        Path(name).write_text(json.dumps({"question": "What is 2 + 2?", "answer": "4"}) + "\n")
    Path("agent.js").touch()
    names: dict[str, Any] = {"__name__": page.stem, "agl": agl, "key": "a-key-of-the-reader"}
    for line, code in blocks(page):
        if not reasons(page, code):
            run(page, line, code, names)


def test_the_table_is_up_to_date() -> None:
    assert {name for name in ELSEWHERE if name not in {p.name for p in PAGES}} == set()
    for page in PAGES:
        held = [reasons(page, code) for _, code in blocks(page)]
        for key in (k for k in NOT_RUN if k[0] == page.name):
            assert sum(key in found for found in held) == 1, f"{key}: one block holds these words"
    for name, test in ELSEWHERE.items():
        read = (ROOT / test).read_text()
        assert name in read or re.sub(r"-.*", "-{", name) in read, f"{test} says nothing of {name}"


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_every_command_is_typed_or_a_line_says_why_not(page: Path) -> None:
    tables: list[Any] = [TYPED, SERVING, TYPED_ELSEWHERE]
    known = [command for table in tables for command in table.get(name_of(page), ())]
    own = {*commands(page)} - {*SEVERAL}
    assert sorted(own) == sorted(known), "tests/source/commands.py has a line for each"
    others = {
        (name_of(page), language) for language, _ in all_blocks(page) if language not in (*SHELL, "python", "text")
    }
    assert others == {key for key in OTHER_BLOCKS if key[0] == name_of(page)}


@pytest.mark.parametrize("name", ["code", "math", "rag", "sentiment", "sql", "support", "terminal", "werewolf"])
def test_the_page_has_the_commands_of_settings_for_a_gpu(name: str) -> None:
    """In the order of the file, one after the other."""
    file = (ROOT / "examples" / name / "config.gpu.yaml").read_text()
    told = "\n".join(f"$ {line}" for line in re.findall(r"^#   (\S.*)$", file, flags=re.MULTILINE))
    assert "$ agl train " in told
    assert f"```console\n{told}\n```" in (ROOT / "docs" / "applications.md").read_text()


def test_what_is_said_to_stand_on_several_pages_does() -> None:
    standing = Counter(command for page in ALL_PAGES for command in set(commands(page)))
    assert {command for command in SEVERAL if standing[command] < 2} == set()


def test_the_tests_that_are_named_exist() -> None:
    reasons = [reason for page in TYPED_ELSEWHERE.values() for reason in page.values()]
    given = (*reasons, *SEVERAL.values(), *OTHER_BLOCKS.values())
    named = {word for reason in given for word in re.findall(r"tests/[\w/]+(?:\.py)?", reason)}
    assert {name for name in named if not (ROOT / name).exists()} == set()
