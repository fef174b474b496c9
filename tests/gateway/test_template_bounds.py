"""A chat template comes with a model: whatever it holds, loading the model and rendering a conversation end soon."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from agentlightning.errors import ModelError
from agentlightning.models import resolve_model
from agentlightning.rendering import load_rendering, sandbox
from tests.gateway.families import TEMPLATES

SAYS = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "range": "{% for a in range(10**9) %}{% endfor %}",
    "list": "{{ range(99999)|list|length }}" * 99
    + "{% for a in range(99999) %}{{ range(99999)|list|length }}{% endfor %}",
    "power": "{{ 10**(10**8) }}",
    "power in steps": "{% set ns = namespace(x=9) %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "times": "{{ 'a' * 10**10 }}",
    "list times": "{{ ([1] * 10**10)|length }}",
    "doubling ~": "{% set ns = namespace(x='ab') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling +": "{% set ns = namespace(x='ab') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling list": "{% set ns = namespace(x=[1]) %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling set": "{% set ns = namespace(x='ab') %}{% for a in range(99) %}{% set y %}{{ ns.x }}{{ ns.x }}{% "
    "endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "doubling format": "{% set ns = namespace(x='ab') %}{% for a in range(99) %}{% set ns.x = "
    "'%s%s'|format(ns.x, ns.x) %}"
    "{% endfor %}",
    "doubling replace": "{% set ns = namespace(x='aa') %}{% for a in range(99) %}{% set ns.x = "
    "ns.x|replace('a', ns.x) %}"
    "{% endfor %}",
    "doubling str.replace": "{% set ns = namespace(x='aa') %}{% for a in range(99) %}"
    "{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
    "doubling join": "{% set ns = namespace(x='aa') %}{% for a in range(99) %}{% set ns.x = ns.x|join(ns.x) "
    "%}{% endfor %}",
    "doubling str.join": "{% set ns = namespace(x='aa') %}{% for a in range(99) %}{% set ns.x = ns.x.join(ns.x) %}"
    "{% endfor %}",
    "center": "{{ 'a'|center(10**10) }}",
    "ljust": "{{ 'a'.ljust(9999999999) }}",
    "indent": "{{ ('a\\n' * 99999)|indent(999999) }}",
    "tojson": "{{ range(99999)|list|tojson(indent=999999) }}",
    "expandtabs": "{{ ('\\t' * 999999).expandtabs(999999) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (9999999999, 1) }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "format nested": "{{ '{:>{w}}'.format(1, w=9999999999) }}",
    "format nested text": "{{ '{:>{w}}'.format(1, w='9999999999') }}",
    "format in pieces": "{{ ('{:>99999' ~ '99999}').format(1) }}",
    "format_map": "{{ '{a:>9999999999}'.format_map({'a': 1}) }}",
    "lipsum": "{{ lipsum(n=99999999) }}",
    "batch": "{{ [1]|batch(9999999999, 0)|list }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "recursion twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "recursive loop": "{% for x in [[[[1]]]] * 999999 recursive %}{{ loop([x] * 99999) }}{% endfor %}",
    "output in a macro": "{% set big = 'a' * 999999 %}{% macro f() %}{% for a in range(99999) %}{{ big }}{% endfor %}"
    "{% endmacro %}{{ f()|length }}",
    "text in a macro": "{% macro f() %}{% for a in range(99999) %}" + "a" * 99999 + "{% endfor %}{% endmacro %}"
    "{{ f()|length }}",
    "text by calls": "{% macro g() %}"
    + "a" * 99999
    + "{% endmacro %}{% macro f() %}{% for a in range(99999) %}{{ g() }}"
    "{% endfor %}{% endmacro %}{{ f()|length }}",
    "deep blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "deep loops": "{% for a in [1] %}" * 60 + "{% endfor %}" * 60,
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep minus": "{{ " + "-" * 5000 + "1 }}",
    "deep list": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "huge": "a" * 3_000_000,
    "map": "{{ range(99999)|map('center', 99999)|list|length }}",
    "sum": "{{ ([[1] * 999] * 99999)|sum(start=[])|length }}",
    "contains": "{% for a in range(99999) %}{{ ('a' * 99999 + 'b') in ('a' * 999999) }}{% endfor %}",
}
"""Each would take minutes, gigabytes or the interpreter's stack."""


def model_with(folder: Path, template: str) -> Path:
    """The model that ships, with another chat template."""
    model = folder / "nice-model"
    shutil.copytree(resolve_model("calc"), model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "agentlightning.json").unlink(missing_ok=True)
    (model / "chat_template.jinja").write_text(template)
    return model


@pytest.mark.quick_with("range", "list times", "doubling ~", "tojson", "format")
@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_template_is_refused_within_seconds_of_processor_time(attack: str) -> None:
    began = time.thread_time()
    with pytest.raises(TemplateError):
        sandbox.render(HOSTILE[attack] + SAYS, [{"role": "user", "content": "Hi"}], tools=None)
    assert time.thread_time() - began < 3 * sandbox.SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["loops", "power", "text by calls"])
def test_a_model_with_one_is_not_loaded(tmp_path: Path, attack: str) -> None:
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        load_rendering(str(model_with(tmp_path, HOSTILE[attack] + SAYS)))


@pytest.mark.slow
def test_one_that_waits_for_a_longer_conversation_is_refused_there(tmp_path: Path) -> None:
    waits = "{% if messages|length > 9 %}" + HOSTILE["loops"] + "{% endif %}" + SAYS
    rendering = load_rendering(str(model_with(tmp_path, waits)), "default")
    assert rendering.render([{"role": "user", "content": "1+1"}], None).size
    with pytest.raises(ModelError, match="more than"):
        rendering.render([{"role": "user", "content": "1+1"}] * 10, None)


@pytest.mark.parametrize("file", sorted(TEMPLATES.glob("*.jinja")), ids=lambda file: file.name)
def test_real_templates_write_what_transformers_writes(file: Path) -> None:
    """Bounds change no prompt."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    conversation = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "reasoning_content": "So.", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
        {"role": "user", "content": "Ok " * 999},
    ]
    template = file.read_text()
    given = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
    for messages in (conversation, conversation[:1]):
        wanted = render_jinja_template([messages], chat_template=template, tools=None, **given)[0][0]
        assert sandbox.render(template, messages, tools=None, **given) == wanted
