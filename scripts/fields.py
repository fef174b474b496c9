"""The table of request fields in docs/gateway.md, from the dialects' own tables and the fields that the clients know.

    python scripts/fields.py

writes it anew. A test compares it with the code.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from agentlightning.gateway.dialects import DIALECTS, Dialect

PAGE = Path(__file__).parents[1] / "docs" / "gateway.md"
BEGIN, END = "<!-- fields: python scripts/fields.py -->\n", "<!-- /fields -->"


def refused(dialect: Dialect) -> list[str]:
    """Fields that the provider's client can send and this gateway refuses by name."""
    assert dialect.client_params is not None, dialect.name
    module, _, name = dialect.client_params.partition(":")
    known = dialect.fields
    return sorted(
        set(get_type_hints(getattr(import_module(module), name))) - {*known.read, *known.harmless, *known.neutral}
    )


def table() -> str:
    lines = [
        "| format | honoured | accepted, no effect | only with the value that changes nothing | refused by name |",
        "|---|---|---|---|---|",
    ]
    for dialect in DIALECTS:
        fields = dialect.fields
        neutral = [f"`{name}` ({_values(values)})" for name, values in fields.neutral.items()]
        cells = [_listed(fields.read), _listed(fields.harmless), ", ".join(neutral), _listed(refused(dialect))]
        lines.append(f"| {dialect.title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _values(values: tuple[Any, ...]) -> str:
    return " or ".join(f"`{value!r}`" for value in values) or "null"


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def main() -> None:
    text = PAGE.read_text()
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: BEGIN + table() + END, text))


if __name__ == "__main__":
    main()
