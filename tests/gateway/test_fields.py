"""Every field that a provider's client can send is honoured, or left out and told; and the docs say which."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.dialects.base import Fields, Kinds
from agentlightning.gateway.dialects.chat import ChatDialect
from agentlightning.gateway.dialects.fields import check_strict
from agentlightning.gateway.exchange import Refusal
from agentlightning.gateway.serving.http import left_out_header

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "fields.py"))
SMALLEST: dict[str, Any] = {
    "chat": {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    "responses": {"model": "m", "input": "x"},
    "messages": {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    "completions": {"model": "m", "prompt": "x"},
    "gemini": {"model": "m", "contents": [{"role": "user", "parts": [{"text": "x"}]}]},
}


BY_NAME = {dialect.name: dialect for dialect in DIALECTS}


def parse(name: str, **fields: Any) -> Any:
    return BY_NAME[name].parse({**SMALLEST[name], **fields}, {})


def test_the_docs_table_is_current() -> None:
    """Made anew by `python scripts/fields.py`."""
    page = (ROOT / "docs" / "gateway.md").read_text()
    assert SCRIPT["BEGIN"] + SCRIPT["table"]() + SCRIPT["END"] in page


@pytest.mark.parametrize("name", BY_NAME)
def test_every_field_of_the_providers_client_is_in_the_table(name: str) -> None:
    assert SCRIPT["unlisted"](BY_NAME[name]) == []


def test_what_no_table_has_is_found_at_any_depth() -> None:
    class Bare(ChatDialect):
        nested: ClassVar[dict[str, Fields | Kinds]] = {
            **ChatDialect.nested,
            "messages[]": Kinds(known={}, by="role"),
            "tools[].function": Fields(()),
        }

    found = SCRIPT["unlisted"](Bare())
    assert "messages[]:user (kind user)" in found
    assert "tools[].function:None name" in found
    assert len({place.partition(":")[0] for place in found}) == 2


@pytest.mark.parametrize("name", BY_NAME)
def test_what_has_no_effect_has_none_and_is_told(name: str) -> None:
    """Also what nobody knows: the request is the one without it, but for the note."""
    plain, fields = parse(name), BY_NAME[name].fields
    for kind, field in [*(("harmless", field) for field in fields.harmless), ("unknown", "no_such_field")]:
        found = parse(name, **{field: {"any": "thing"}})
        assert _seen(found) == _seen(plain)
        assert [(one.field, one.kind) for one in found.left_out] == [(field, kind)]
        assert not parse(name, **{field: None}).left_out, "null is absent"
        if kind == "harmless":
            check_strict(found.left_out)
        else:
            with pytest.raises(Refusal) as refusal:
                check_strict(found.left_out)
            assert refusal.value.param == field


@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_not_to_be_had_is_left_out_or_refused_by_name(name: str) -> None:
    plain = parse(name)
    for field, cannot in BY_NAME[name].fields.unavailable.items():
        for value in cannot.neutral:
            found = parse(name, **{field: value})
            assert (_seen(found), found.left_out) == (_seen(plain), ())
        if not cannot.needed:
            found = parse(name, **{field: ["another"]})
            assert _seen(found) == _seen(plain)
            assert [(one.field, one.kind, one.why) for one in found.left_out] == [(field, "unavailable", cannot.why)]
            continue
        with pytest.raises(Refusal) as refusal:
            parse(name, **{field: ["another"]})
        assert refusal.value.param == field
        assert cannot.why in refusal.value.message


def test_what_is_left_out_is_bounded_and_fit_for_a_header() -> None:
    odd = {f"x{i}\r\nset-cookie: é{'y' * 500}": 1 for i in range(1000)}
    found = parse("chat", **odd).left_out
    assert len(found) <= 64
    ((name, value),) = left_out_header(found)
    assert name == b"x-agl-left-out"
    assert len(value) < 2000
    assert value.isascii()
    assert value.decode().isprintable()


def _seen(request: Any) -> Any:
    """What is sampled from a request; not the copy of the body that is repeated in the answer."""
    return [getattr(request, name) for name in request.__struct_fields__ if name not in ("private", "left_out")]
