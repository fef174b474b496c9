"""Every field that a provider's client can send is honoured, harmless, or refused by name; and the docs say which."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.exchange import Refusal

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "fields.py"))
SMALLEST: dict[str, Any] = {
    "chat": {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    "responses": {"model": "m", "input": "x"},
    "messages": {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    "completions": {"model": "m", "prompt": "x"},
}


BY_NAME = {dialect.name: dialect for dialect in DIALECTS}


def parse(name: str, **fields: Any) -> Any:
    return BY_NAME[name].parse({**SMALLEST[name], **fields}, {})


def test_the_docs_table_is_current() -> None:
    """Made anew by `python scripts/fields.py`."""
    page = (ROOT / "docs" / "gateway.md").read_text()
    assert SCRIPT["BEGIN"] + SCRIPT["table"]() + SCRIPT["END"] in page


@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_refused_is_refused_by_name(name: str) -> None:
    for field in [*SCRIPT["refused"](BY_NAME[name]), "no_such_field"]:
        with pytest.raises(Refusal) as refusal:
            parse(name, **{field: "something"})
        assert refusal.value.param == field
        assert parse(name, **{field: None}), "null is absent"


@pytest.mark.parametrize("name", BY_NAME)
def test_what_has_no_effect_has_none(name: str) -> None:
    plain = parse(name)
    for field in BY_NAME[name].fields.harmless:
        found = parse(name, **{field: {"any": "thing"}})
        assert _seen(found) == _seen(plain)
    for field, values in BY_NAME[name].fields.neutral.items():
        for value in values:
            assert _seen(parse(name, **{field: value})) == _seen(plain)
        with pytest.raises(Refusal) as refusal:
            parse(name, **{field: ["another"]})
        assert refusal.value.param == field


def _seen(request: Any) -> Any:
    """What is sampled from a request; not the copy of the body that is repeated in the answer."""
    return [getattr(request, name) for name in request.__struct_fields__ if name != "private"]
