"""How a model's renderer is found, and what is said when it cannot be."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentlightning.errors import ModelError
from agentlightning.gateway import load_rendering
from agentlightning.models import resolve_model
from agentlightning.rendering.load import _tools_survive  # pyright: ignore[reportPrivateUsage]
from agentlightning.rendering.reader import StreamReader
from tests.gateway.conftest import CALC, call_text
from tests.gateway.families import FAMILIES, make_model, rendering_of

CALC_DIR = Path(resolve_model("calc"))
USER: Any = {"role": "user", "content": "What is 2 + 3?"}

LLAMA_LIKE = (
    "{% for m in messages %}<<{{ m.role }}>>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[[{{ c.function.name }}|{{ c.function.arguments | tojson }}]]{% endfor %}\n{% "
    "endfor %}"
    "{% if add_generation_prompt %}<<assistant>>{% endif %}"
)
"""A format of its own, whose tool calls nobody knows how to read."""

HERMES_LIKE = (
    "{% for m in messages %}<<{{ m.role }}>>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<<assistant>>{% endif %}"
)
"""A format of its own, with tool calls in a syntax that is known."""


def model_dir(tmp_path: Path, template: str | None = None, settings: dict[str, Any] | None = None) -> str:
    """The shipped model's tokenizer, with another template and settings."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CALC_DIR / name, tmp_path)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    if settings is not None:
        (tmp_path / "agentlightning.json").write_text(json.dumps(settings))
    return str(tmp_path)


def test_the_renderer_is_the_one_that_agrees_with_the_template(tmp_path: Path) -> None:
    found = load_rendering(model_dir(tmp_path, (CALC_DIR / "chat_template.jinja").read_text()))
    assert found.name == "qwen3"
    assert found.parses_tools


def test_a_named_renderer_wins_and_takes_options(tmp_path: Path) -> None:
    settings = {"renderer": "qwen3", "renderer_options": {"enable_thinking": False}}
    found = load_rendering(model_dir(tmp_path, LLAMA_LIKE, settings))
    assert found.name == "qwen3"
    assert found.decode(found.render([USER], None)).endswith("<think>\n\n</think>\n\n")
    assert load_rendering(str(tmp_path), renderer="default").name == "default"


def test_tools_that_could_not_be_read_back_stop_the_start(tmp_path: Path) -> None:
    path = model_dir(tmp_path, LLAMA_LIKE)
    with pytest.raises(ModelError, match="as `renderer`"):
        load_rendering(path)
    without = load_rendering(path, renderer="default")
    assert not without.parses_tools
    assert without.decode(without.render([USER], None)) == "<<user>>What is 2 + 3?<<assistant>>"


def test_a_template_of_its_own_with_known_tool_calls(tmp_path: Path) -> None:
    found = load_rendering(model_dir(tmp_path, HERMES_LIKE))
    assert (found.name, found.parses_tools) == ("default", True)
    prompt = found.render([USER], [CALC])
    (call,) = found.parse(found.encode(call_text(2, 3) + "<|im_end|>"), prompt, [CALC]).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("calc", {"a": 2, "b": 3})
    bridge = found.bridge(prompt, found.encode("x<|im_end|>"), [USER], None, keep_reasoning=True)
    assert bridge is not None
    assert found.decode(bridge) == "<<user>>What is 2 + 3?<|im_end|><<assistant>>"


@pytest.mark.parametrize(
    ("renderer", "template", "message"),
    [("no-such", HERMES_LIKE, "no-such"), ("llama-3", HERMES_LIKE, "does not fit"), (None, None, "no chat template")],
)
def test_wrong_choices_say_what_to_do(tmp_path: Path, renderer: str | None, template: str | None, message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        load_rendering(model_dir(tmp_path, template), renderer=renderer)
    assert "`renderer`" in str(error.value)


def test_a_missing_model_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model directory"):
        load_rendering(str(tmp_path / "none"))
    with pytest.raises(ModelError, match=r"There is no tokenizer in"):
        load_rendering(str(tmp_path))


@pytest.mark.slow
def test_rendering_needs_no_torch_and_no_client_of_openais() -> None:
    code = (
        "import sys; from agentlightning.gateway import load_rendering; from agentlightning.models import "
        "resolve_model;"
        "r = load_rendering(resolve_model('calc')); r.render([{'role': 'user', 'content': 'x'}], None);"
        "assert not {'torch', 'openai'} & sys.modules.keys();"
        "import openai; openai.OpenAI, openai.AsyncOpenAI(api_key='x', base_url='http://127.0.0.1:1')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "text",
    [
        "Plain text.",
        "  <think>\nOne\n two </think>\n\n Three  \n four.\n",
        "<think>\nnever closed",
        '{"name": "calc", "parameters": {"a": 1}}',
        ' {"is": "no call"} at all',
        "Some text\n" + call_text(1, 2) + "\n" + call_text(3, 4),
        "<think>x</think>" + call_text(1, 2),
        "<tool_call>\nbroken",
        "ünï 🙂 \U0001f600 end STOP after",
        "",
    ],
)
@pytest.mark.parametrize("tools", [[CALC], None])
@pytest.mark.parametrize("model", ["calc", "qwen3-template", "llama3", "llama3-template", "gpt-oss-template"])
def test_what_is_streamed_is_what_is_parsed(model: str, text: str, tools: Any) -> None:
    """Fed token by token, a reader never sends what the parser would take back, and in the end sends all of it."""
    rendering = load_rendering(str(CALC_DIR)) if model == "calc" else rendering_of(model)
    prompt = rendering.render([USER], tools)
    ids = [*rendering.encode(text).tolist(), rendering.stop_token_ids[0]]
    reader = StreamReader(rendering, prompt, tools=bool(tools), stop=())
    content = reasoning = ""
    for token in ids:
        part = reader.feed([token])
        content, reasoning = content + part.content, reasoning + part.reasoning
    parsed = rendering.parse(rendering.encode(text), prompt, tools)
    assert parsed.content.startswith(content)
    rest = reader.finish(parsed.content, parsed.reasoning)
    assert (content + rest.content, reasoning + rest.reasoning) == (parsed.content, parsed.reasoning or "")


@pytest.mark.parametrize("tools", [[CALC], None])
@pytest.mark.parametrize("model", ["qwen3", "qwen3-template", "llama3", "llama3-template"])
def test_text_is_streamed_by_token(model: str, tools: Any) -> None:
    rendering = rendering_of(model)
    reader = StreamReader(rendering, rendering.render([USER], tools), tools=bool(tools), stop=())
    assert [reader.feed([token]).content for token in rendering.encode("ab c").tolist()] == ["a", "b", "", " c"]


class WholeTurns:
    """A renderer whose prompts begin the answer with a thought, and which reads turns from their beginning only."""

    ASSISTANT, THOUGHT, CALL = 1, 2, 3

    def render_ids(self, messages: list[Any], *, tools: list[Any], add_generation_prompt: bool) -> list[int]:
        begun = [self.ASSISTANT, self.THOUGHT, self.THOUGHT] if add_generation_prompt else []
        return [0, *([self.ASSISTANT, self.THOUGHT, self.CALL] if len(messages) > 1 else begun)]

    def parse_response(self, ids: list[int], *, tools: list[Any], prompt_ids: list[int]) -> Any:
        call = SimpleNamespace(name="add", arguments={"a": 2}, status="ok")
        return SimpleNamespace(tool_calls=[call] if ids == [self.ASSISTANT, self.THOUGHT, self.CALL] else [])


def test_a_renderer_that_reads_whole_turns_reads_tool_calls() -> None:
    assert _tools_survive(WholeTurns())


def test_tools_are_read_where_the_prompt_begins_the_thought(tmp_path: Path) -> None:
    """As the library's renderer of GPT-OSS does: a call then does not begin where the prompt ends."""
    path = make_model(FAMILIES["gpt-oss-template"], tmp_path)
    template = (path / "chat_template.jinja").read_text()
    begun = template.replace(
        "{{- '<|start|>assistant' }}{%- endif", "{{- '<|start|>assistant<|channel|>analysis<|message|>' }}{%- endif"
    )
    assert begun != template
    (path / "chat_template.jinja").write_text(begun)
    found = load_rendering(str(path))
    prompt = found.render([USER], [CALC])
    said = 'Hm.<|end|><|start|>assistant to=functions.calc<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    parsed = found.parse(found.encode(said), prompt, [CALC])
    assert (parsed.reasoning, parsed.content) == ("Hm.", "")
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("calc", '{"a": 1}')]


@pytest.mark.parametrize("text", ["STOP", "Some S and then STOP", "ST", "S", "STOPS"])
@pytest.mark.parametrize("model", ["calc", "llama3"])
def test_a_stop_string_is_never_streamed_even_where_the_response_begins_with_it(model: str, text: str) -> None:
    rendering = load_rendering(str(CALC_DIR)) if model == "calc" else rendering_of(model)
    reader = StreamReader(rendering, rendering.render([USER], None), tools=False, stop=("STOP",))
    sent = "".join(reader.feed([token]).content for token in rendering.encode(text).tolist())
    assert text.partition("STOP")[0].startswith(sent)
    assert "ST" not in sent


@pytest.mark.parametrize("tools", [[CALC], None])
@pytest.mark.parametrize("model", ["qwen3", "qwen3-template"])
def test_special_tokens_in_a_response_are_streamed_as_they_are_parsed(model: str, tools: Any) -> None:
    """A model that has collapsed writes them anywhere; some parsers leave them out, others do not."""
    rendering = rendering_of(model)
    for text in ("a <|im_start|> b", "<think>a<tool_call>b", "<think><tool_call>b", "<think>a</think><tool_call>b"):
        ids, prompt = rendering.encode(text), rendering.render([USER], tools)
        reader = StreamReader(rendering, prompt, tools=bool(tools), stop=())
        parts = [reader.feed([token]) for token in ids.tolist()]
        parsed = rendering.parse(ids, prompt, tools)
        rest = reader.finish(parsed.content, parsed.reasoning)
        sent = "".join(p.content for p in parts) + rest.content, "".join(p.reasoning for p in parts) + rest.reasoning
        assert sent == (parsed.content, parsed.reasoning or "")


def test_brackets_without_end_are_text() -> None:
    for model, text in (
        ("gpt-oss-template", "<|channel|>commentary to=functions.calc<|message|>" + "[" * 3000),
        ("qwen3", '<tool_call>\n{"name": "calc", "arguments": ' + "[" * 3000),
    ):
        rendering = rendering_of(model)
        parsed = rendering.parse(rendering.encode(text), rendering.render([USER], [CALC]), [CALC])
        assert parsed.tool_calls == ()
        assert "[" * 100 in parsed.content
