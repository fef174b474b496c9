"""Templates: look-ups in the item and the sample, and nothing else."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from agentlightning.errors import GraderRefused
from agentlightning.finetuning.graders.base import MissingVariable, Template
from agentlightning.finetuning.graders.result import Sample

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
SAMPLE = Sample('{"x": [1, {"y z": "deep"}], "no": null}', {"x": [1, {"y z": "deep"}], "no": None}, [CALL]).as_dict()
ITEM = {"a": {"b": "B", "0": "zero"}, "n": 5, "yes": True, "list": ["p", "q"], "text": "{{ item.n }}"}


def filled(text: str) -> str:
    return Template.parse(text, "input").fill(ITEM, SAMPLE)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain {x} }} {", "plain {x} }} {"),
        ("{{ item.a.b }}{{item.n}}", "B5"),
        ("{{ item.list[1] }} {{item.list.0}} {{ item.yes }}", "q p true"),
        ("{{ sample.output_json.x[1]['y z'] }}", "deep"),
        ("{{ sample.output_json.no }}", "null"),
        ("{{ sample.output_tools[0].function.name }}", "look"),
        ("{{ item.a }}", '{"b": "B", "0": "zero"}'),
        ("{{ item.a[0] }}", "zero"),
        ("{{ item.text }}", "{{ item.n }}"),
        ("{{\n item . a [ 'b' ]\n}}", "B"),
    ],
)
def test_examples(text: str, expected: str) -> None:
    assert filled(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("{{ foo }}", "{{ item.a.b() }}", "{{ items.a }}", "{{ item..a }}", "{{ item.a | upper }}", "{{ 7 * 7 }}"),
        *("{{ sample.output }}", "{{}}", "{{ item['a }}", "{{ item.a + 1 }}", "{{ sample.output_audio }}"),
    ],
)
def test_what_is_no_variable_is_refused(text: str) -> None:
    with pytest.raises(GraderRefused) as refused:
        Template.parse(text, "grader.input")
    assert refused.value.param == "grader.input"


@pytest.mark.parametrize("path", ["item.zz", "item.n.real", "item.__class__", "item.list[9]", "item.list.append"])
def test_what_is_not_there_is_missing(path: str) -> None:
    with pytest.raises(MissingVariable) as missing:
        filled(f"{{{{ {path} }}}}")
    assert not missing.value.of_output


def test_no_text_takes_long() -> None:
    for text in ("{{" * 500_000, "{{ x" * 250_000, "{{" + " " * 10**6, "{ {{ " * 200_000 + "}" * 10**6):
        with contextlib.suppress(GraderRefused):
            Template.parse(text, "input")


def test_an_output_that_is_no_json_is_told_from_a_missing_variable() -> None:
    with pytest.raises(MissingVariable) as missing:
        Template.parse("{{ sample.output_json.x }}", "input").fill({}, Sample.of_text("no JSON").as_dict())
    assert missing.value.of_output


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.text(alphabet="{} itemsampl.[]'\"0_x", max_size=40), json_values)
def test_no_text_does_more_than_be_refused_or_filled(text: str, item: Any) -> None:
    with contextlib.suppress(GraderRefused, MissingVariable):
        assert isinstance(Template.parse(text, "input").fill(item, SAMPLE), str)


@given(json_values, st.text(alphabet="{} }{", max_size=10))
def test_every_value_is_found_by_its_path(value: Any, around: str) -> None:
    template = Template((around, (("item", "v"), "item.v"), around))
    written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    assert template.fill({"v": value}, {}) == f"{around}{written}{around}"
