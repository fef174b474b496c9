"""The table of request fields in docs/gateway.md, from the dialects' own tables.

    python scripts/fields.py

writes it anew. A test compares it with the code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

from typing_extensions import is_typeddict

from agentlightning.gateway.dialects import DIALECTS, Dialect
from agentlightning.gateway.dialects.base import Fields, Kinds, Unavailable

PAGE = Path(__file__).parents[1] / "docs" / "gateway.md"
BEGIN, END = "<!-- fields: python scripts/fields.py -->\n", "<!-- /fields -->"


def unlisted(dialect: Dialect) -> list[str]:
    """What the provider's client can send and no table of this gateway's has: fields, and kinds of objects, at any
    depth that has a table.
    """
    if dialect.client_params is None:  # its client is walked where it is installed, in tests/clients
        return []
    module, _, name = dialect.client_params.partition(":")
    tables: dict[str, list[Fields | Kinds]] = {"": [dialect.fields]}
    for place, table in dialect.nested.items():
        tables.setdefault(place.partition(" ")[0], []).append(table)
    found = set[str]()
    for place, kind, fields in typed_objects(getattr(import_module(module), name)):
        missing = [_missing(table, kind, fields) for table in tables.get(place, ())]
        if missing:  # of two tables for one place, each is for some of its objects
            found |= {f"{place}:{kind} {field}" for field in min(missing, key=len)}
    return sorted(found)


def _missing(table: Fields | Kinds, kind: str | None, fields: set[str]) -> set[str]:
    if isinstance(table, Fields):
        return fields - names(table)
    kind = table.default if kind is None else kind
    known = table.known.get(kind) if kind is not None else None
    if known is not None:
        return fields - names(known)
    return set() if kind in table.harmless or table.why(kind) is not None else {f"(kind {kind})"}


def typed_objects(hint: Any, place: str = "") -> Iterator[tuple[str, str | None, set[str]]]:
    """The objects that a type is made of: where each stands, its kind (what its `type` or `role` says), its fields."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Required, NotRequired, Annotated):
        yield from typed_objects(inner[0], place)
    elif origin in (Union, UnionType):
        for one in inner:
            yield from typed_objects(one, place)
    elif is_typeddict(hint):
        fields = get_type_hints(hint)
        tells = fields.get("type", fields.get("role"))
        for kind in get_args(tells) if get_origin(tells) is Literal else (None,):
            yield place, kind, set(fields)
        for name, field in fields.items():
            if place.count(".") < _DEEPEST:
                yield from typed_objects(field, f"{place}.{name}" if place else name)
    elif origin not in (None, Literal, dict):
        for one in inner:
            yield from typed_objects(one, f"{place}[]")


_DEEPEST = 4


def names(fields: Fields) -> set[str]:
    """All that a table lists."""
    return {*fields.honoured, *fields.harmless, *fields.unavailable}


def table() -> str:
    lines: list[str] = []
    for dialect in DIALECTS:
        head = "| in | honoured | accepted, no effect | not available |"
        lines += [f"\n### {dialect.title}\n", head, "|---|---|---|---|", *_rows("the request", dialect.fields)]
        for place, fields in dialect.nested.items():
            lines += _rows(f"`{place}`", fields)
    return "\n".join(lines) + "\n\n"


def _rows(place: str, fields: Fields | Kinds) -> list[str]:
    if isinstance(fields, Fields):
        cells = [_listed(fields.honoured), _listed(fields.harmless), _unavailable(fields)]
        return [f"| {place} | {' | '.join(cells)} |"]
    left_out = _by_reason((f"`{name}`", why) for name, why in fields.unavailable.items())
    rows = [f"| kinds of {place} | {_listed(fields.known)} | {_listed(fields.harmless)} | {left_out} |"]
    alike: dict[int, list[str]] = {}
    for kind, known in fields.known.items():
        alike.setdefault(id(known), []).append(kind)
    for kinds in alike.values():
        rows += _rows(f"{place}, {_listed(kinds)}", fields.known[kinds[0]])
    return rows


def _unavailable(fields: Fields) -> str:
    return _by_reason((_named(name, cannot), cannot.why) for name, cannot in fields.unavailable.items())


def _by_reason(found: Iterable[tuple[str, str]]) -> str:
    reasons: dict[str, list[str]] = {}
    for name, why in found:
        reasons.setdefault(why, []).append(name)
    return "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())


def _named(name: str, cannot: Unavailable) -> str:
    but = f" (except {' or '.join(f'`{json.dumps(value)}`' for value in cannot.neutral)})" if cannot.neutral else ""
    return f"`{name}`{but}{' (refused)' if cannot.needed else ''}"


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main() -> None:
    text = PAGE.read_text()
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: BEGIN + table() + END, text))


if __name__ == "__main__":
    main()
