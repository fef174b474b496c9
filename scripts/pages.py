"""Runs a page of the documentation: its Python blocks in order, in one namespace, as cells of a notebook are run.

    python scripts/pages.py docs/one-token.md           prints what each block prints
    python scripts/pages.py docs/one-token.md --check   fails where that is not what the page says, numbers aside
    python scripts/pages.py docs/one-token.md --write   puts it into the page

What a block prints stands in the `text` block right behind it. `await` needs no function around it.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import inspect
import io
import re
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<said>.*?)^```\n)?", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")


def run(page: Path) -> list[tuple[re.Match[str], str]]:
    """Each block with what it printed. What a block raises ends it all."""
    text, names, found = page.read_text(), {"__name__": page.stem}, []
    with asyncio.Runner() as loop:
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start("code"))
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                _run("\n" * line + block["code"], page, names, loop)
            found.append((block, printed.getvalue()))
    return found


def _run(code: str, page: Path, names: dict[str, Any], loop: asyncio.Runner) -> None:
    """One block; its lines are counted as in the page."""
    compiled = compile(code, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if compiled.co_flags & inspect.CO_COROUTINE:
        loop.run(eval(compiled, names))
    else:
        exec(compiled, names)


def differing(ran: list[tuple[re.Match[str], str]]) -> list[str]:
    """What was printed otherwise than the page says, numbers aside."""
    wrong = []
    for block, printed in ran:
        said = block["said"] or ""
        if NUMBER.sub("#", said) != NUMBER.sub("#", printed):
            wrong.append(f"The page says:\n{said}\nIt prints:\n{printed}")
    return wrong


def written(text: str, ran: list[tuple[re.Match[str], str]]) -> str:
    """The page with what was printed in its `text` blocks."""
    for block, printed in reversed(ran):
        output = f"\n```text\n{printed}```\n" if printed else ""
        text = f"{text[: block.start()]}```python\n{block['code']}```\n{output}{text[block.end() :]}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    ran = run(given.page)
    if given.check and (wrong := differing(ran)):
        raise SystemExit("\n".join(wrong))
    if given.write:
        given.page.write_text(written(given.page.read_text(), ran))
    if not given.check and not given.write:
        print("\n".join(printed for _, printed in ran))


if __name__ == "__main__":
    main()
