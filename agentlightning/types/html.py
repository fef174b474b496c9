"""Records as HTML for notebooks. Pure; everything is escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any


def fields_html(title: str, values: Mapping[str, Any]) -> str:
    """A title and a row per value that there is."""
    rows = [(name, _text(value)) for name, value in values.items() if value not in (None, {}, [])]
    return f"<b>{escape(title)}</b>{table_html((), rows)}"


def table_html(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table of texts."""
    head = f"<tr>{''.join(f'<th>{escape(t)}</th>' for t in titles)}</tr>" if titles else ""
    cell = '<td style="text-align:left;white-space:pre-wrap">{}</td>'
    body = "".join(f"<tr>{''.join(cell.format(escape(str(value))) for value in row)}</tr>" for row in rows)
    return f"<table>{head}{body}</table>"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
