"""The tables of docs/from-0.3.md, made from the tables of this package.

python -m agentlightning.compat.page docs/from-0.3.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from agentlightning.compat.row import Old
from agentlightning.compat.table import ARGUMENTS, MEMBERS, MODULES, NAMES
from agentlightning.compat.verl_keys import MAPPED, NO_MEANING, REFUSED, TOGETHER


def tables() -> dict[str, str]:
    """Each table of the page by its name."""
    return {
        "modules": _table(("module", "state", "today", "differs"), map(_row, MODULES)),
        "names": _table(("name", "state", "today", "differs"), map(_row, NAMES)),
        "members": _table(("method or property", "state", "today", "better"), map(_row, MEMBERS)),
        "arguments": _table(("argument", "state", "today", "because"), map(_row, ARGUMENTS)),
        "verl": _table(("key", "is"), sorted(_keys())),
        "verl-refused": _table(("key", "what to do"), ((f"`{key}`", why) for key, (_, why) in sorted(REFUSED.items()))),
        "verl-without": _table(
            ("key, or what keys begin with", "why"), sorted((f"`{k}`", w) for k, w in NO_MEANING.items())
        ),
    }


def _keys() -> Iterable[tuple[str, str]]:
    yield from ((f"`{key}`", f"`{name}`") for key, (name, _) in MAPPED.items())
    yield from ((f"`{key}`", meaning) for key, meaning in TOGETHER.items())


def _row(old: Old) -> Sequence[str]:
    newer = f"`{old.newer}`" if old.newer else ""
    return f"`{old.name.replace(':', '.')}`", old.state, newer, old.note


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows that differ in their first cell alone are one row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for first, *rest in rows:
        alike.setdefault(tuple(rest), []).append(first)
    lines = [head, ["---"] * len(head), *((", ".join(firsts), *rest) for rest, firsts in alike.items())]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def written(page: str) -> str:
    """The page with its tables made anew: each stands between `<!-- table NAME -->` and `<!-- end -->`."""
    made = tables()
    return re.sub(
        r"(?s)(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}\n{made[m[2]]}\n\n{m[3]}", page
    )


def main() -> None:
    page = Path(sys.argv[1])
    page.write_text(written(page.read_text()))


if __name__ == "__main__":
    main()
