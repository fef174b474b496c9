"""The table of request fields in docs/gateway.md, from the dialects' own tables.

    python scripts/fields.py

writes it anew. A test compares it with the code.
"""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from agentlightning.gateway.dialects import DIALECTS, Dialect
from agentlightning.gateway.dialects.base import Fields, Kinds, Unavailable

PAGE = Path(__file__).parents[1] / "docs" / "gateway.md"
BEGIN, END = "<!-- fields: python scripts/fields.py -->\n", "<!-- /fields -->"


def unlisted(dialect: Dialect) -> list[str]:
    """Fields that the provider's client can send and that stand in no table of this gateway's."""
    if dialect.client_params is None:  # its client is walked where it is installed, in tests/clients
        return []
    module, _, name = dialect.client_params.partition(":")
    return sorted(set(get_type_hints(getattr(import_module(module), name))) - names(dialect.fields))


def names(fields: Fields) -> set[str]:
    """All that a table lists."""
    return {*fields.honoured, *fields.harmless, *fields.unavailable}


def table() -> str:
    lines = ["| format | in | honoured | accepted, no effect | not to be had |", "|---|---|---|---|---|"]
    for dialect in DIALECTS:
        lines += _rows(dialect.title, "the request", dialect.fields)
        for place, fields in dialect.nested.items():
            lines += _rows("", f"`{place}`", fields)
    return "\n".join(lines) + "\n"


def _rows(title: str, place: str, fields: Fields | Kinds) -> list[str]:
    if isinstance(fields, Fields):
        cells = [_listed(fields.honoured), _listed(fields.harmless), _unavailable(fields)]
        return [f"| {title} | {place} | {' | '.join(cells)} |"]
    reasons: dict[str, list[str]] = {}
    for name, why in fields.unavailable.items():
        reasons.setdefault(why, []).append(name)
    left_out = "; ".join(f"{_listed(kinds)}: {why}" for why, kinds in reasons.items()) or "none"
    rows = [f"| {title} | kinds of {place} | {_listed(fields.known)} | {_listed(fields.harmless)} | {left_out} |"]
    alike: dict[int, list[str]] = {}
    for kind, known in fields.known.items():
        alike.setdefault(id(known), []).append(kind)
    for kinds in alike.values():
        rows += _rows("", f"{place}, {_listed(kinds)}", fields.known[kinds[0]])
    return rows


def _unavailable(fields: Fields) -> str:
    return "; ".join(_reason(name, cannot) for name, cannot in fields.unavailable.items()) or "none"


def _reason(name: str, cannot: Unavailable) -> str:
    but = f" (but {' or '.join(f'`{json.dumps(value)}`' for value in cannot.neutral)})" if cannot.neutral else ""
    return f"`{name}`{but}{', refused' if cannot.needed else ''}: {cannot.why}"


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def main() -> None:
    text = PAGE.read_text()
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: BEGIN + table() + END, text))


if __name__ == "__main__":
    main()
