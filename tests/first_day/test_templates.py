"""A model whose chat template is broken: the file, the line, and what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.models import shipped_models
from agentlightning.rendering.load import doubt_about, load_rendering

GOOD = (shipped_models()["calc"] / "chat_template.jinja").read_text()
LOOP = "{% for m in messages %}\n"
LINES = len(GOOD.splitlines())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the shipped model that does not say which renderer it wants."""
    folder = tmp_path / "model"
    shutil.copytree(shipped_models()["calc"], folder)
    (folder / "agentlightning.json").unlink()
    return folder


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (GOOD.replace("{%- endif", "{%- enddif", 1), ["line 6 ({%- enddif %})", "unknown tag 'enddif'"]),
        (GOOD + "\n{% if messages %}", [f"line {LINES + 2} ({{% if messages %}})", "end of template"]),
        (LOOP + "{{ m.content | shout }}{% endfor %}", ["line 2", "No filter named 'shout'"]),
        (LOOP + "\n{{ shout(m.content) }}{% endfor %}", ["line 3", "'shout' is undefined"]),
        (LOOP + "{{ m.role.name.first }}{% endfor %}", ["line 2", "no attribute 'name'"]),
        ("{{ raise_exception('Only tools') }}", ["line 1", "Only tools"]),
        ("Hello!", ["drops what the user says", "'Hello!'"]),
        ("", ["drops what the user says"]),
    ],
)
def test_the_line_is_named(model: Path, template: str, words: list[str]) -> None:
    (model / "chat_template.jinja").write_text(template)
    with pytest.raises(agl.ModelError) as caught:
        load_rendering(str(model))
    for said in [*words, str(model / "chat_template.jinja"), "Mend the template"]:
        assert said in str(caught.value)


def test_a_template_in_the_configuration(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": LOOP}))
    with pytest.raises(agl.ModelError, match=r"tokenizer_config\.json, chat_template, line 1 "):
        load_rendering(str(model), "default")


def test_a_template_that_fails_on_tools(model: Path) -> None:
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}\n{{ tools.a.b }}{% endif %}"
    )
    with pytest.raises(agl.ModelError) as caught:
        load_rendering(str(model))
    assert "line 2" in str(caught.value)
    assert "writes tool calls" in str(caught.value)


def test_a_renderer_that_was_named_is_compared_with_the_template(model: Path) -> None:
    assert doubt_about(str(model), "qwen3") is None
    assert doubt_about(str(model), "default") is None
    (model / "chat_template.jinja").write_text(GOOD.replace("<|im_start|>", "<|im_end|>"))
    assert load_rendering(str(model), "qwen3").name == "qwen3", "it is taken all the same"
    for said in ("renderer='qwen3'", "other prompts", "Leave renderer out"):
        assert said in (doubt_about(str(model), "qwen3") or "")
    (model / "chat_template.jinja").write_text(LOOP + "{{ m.content | shout }}{% endfor %}")
    for said in ("renderer='qwen3'", "without a check", "line 2", "No filter named 'shout'"):
        assert said in (doubt_about(str(model), "qwen3") or "")


def test_a_sound_template_is_taken(model: Path) -> None:
    assert load_rendering(str(model)).name == "qwen3"
