"""The shipped model: plain `transformers` loads it offline, it speaks Qwen3's format, it is as good as promised."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from renderers import Qwen3Renderer, ToolCallParseStatus
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from examples.calc.calc_agent import CALC_TOOL, SYSTEM_PROMPT
from examples.calc.make_model import IGNORED, demonstration_loss, save
from examples.calc.play import play, success
from examples.calc.tasks import make_tasks

MODEL = Path(__file__).parents[2] / "agentlightning" / "models" / "calc"
OTHER_TOOL = {"type": "function", "function": {"name": "größe", "description": "<b>&'é", "parameters": {}}}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A model this small gains nothing from more, and loses a lot where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def renderer(tokenizer: PreTrainedTokenizerBase) -> Qwen3Renderer:
    return Qwen3Renderer(tokenizer)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def say(role: str, content: str | None, *arguments: str | dict[str, Any]) -> dict[str, Any]:
    """A message, with a tool call for each of `arguments`."""
    calls = [{"type": "function", "id": "c", "function": {"name": "calc", "arguments": given}} for given in arguments]
    return {"role": role, "content": content} | ({"tool_calls": calls} if calls else {})


SYSTEM = say("system", SYSTEM_PROMPT)
CONVERSATIONS = {
    "user only": [say("user", "hi")],
    "system only": [SYSTEM],
    "unicode": [SYSTEM, say("user", "héllo 日本語 🙂 e\u0301 １２ 1234")],
    "answered": [SYSTEM, say("user", "a"), say("assistant", "b")],
    "two questions": [SYSTEM, say("user", "a"), say("assistant", "b"), say("user", "c")],
    "no question": [SYSTEM, say("assistant", "b")],
    "system later": [say("user", "a"), SYSTEM, say("user", "b"), say("assistant", "c"), say("assistant", "d")],
    "tool call": [
        SYSTEM,
        say("user", "What is 12 * 7?"),
        say("assistant", None, '{"a": 12, "op": "*", "b": 7}'),
        say("tool", "84"),
        say("assistant", "The answer is 84."),
    ],
    "arguments as an object": [say("user", "a"), say("assistant", "", {"é": "ü<&>'", "b": [1, None]})],
    "parallel calls": [
        SYSTEM,
        say("user", "a"),
        say("assistant", "Let me see.", {"a": 1}, '{"a": 2}', {}),
        say("tool", "1"),
        say("tool", "two 🙂"),
        say("tool", "Error:\n\nno"),
        say("assistant", "\n\nDone."),
        say("user", "And now?"),
        say("assistant", "", '{"a": 3}'),
        say("tool", ""),
    ],
    "tool response as a user": [
        say("user", "a"),
        say("user", " <tool_response>\n1\n</tool_response>"),
        say("assistant", "b"),
    ],
}


@pytest.mark.parametrize("tools", [None, [CALC_TOOL], [CALC_TOOL, OTHER_TOOL]], ids=["no tools", "calc", "two tools"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_template_and_renderer_agree(
    name: str, tools: list[Any] | None, tokenizer: PreTrainedTokenizerBase, renderer: Qwen3Renderer
) -> None:
    messages: Any = CONVERSATIONS[name]
    for prompt in (True, False):
        rendered = renderer.render_ids(messages, tools=tools, add_generation_prompt=prompt)
        templated: Any = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=prompt, return_dict=False
        )
        assert tokenizer.decode(rendered) == tokenizer.decode(templated)
        assert rendered == templated


def test_tool_calls_are_parsed_from_the_ids(tokenizer: PreTrainedTokenizerBase, renderer: Qwen3Renderer) -> None:
    text = '<tool_call>\n{"name": "calc", "arguments": {"a": 1, "op": "+", "b": 22}}\n</tool_call><|im_end|>'
    parsed = renderer.parse_response(tokenizer.encode(text, add_special_tokens=False))
    (call,) = parsed.tool_calls
    assert (call.status, call.name, call.arguments) == (ToolCallParseStatus.OK, "calc", {"a": 1, "op": "+", "b": 22})
    assert parsed.content == ""


def test_tokens_have_the_roles_they_have_in_qwen3(tokenizer: PreTrainedTokenizerBase) -> None:
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    assert all(len(tokenizer.encode(text)) == 1 for text in marks + special)
    ids: Any = tokenizer.convert_tokens_to_ids
    assert set(ids(list(special))) <= set(tokenizer.all_special_ids)
    assert not set(ids(list(marks))) & set(tokenizer.all_special_ids)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize("text", ["The answer is 1234.", "naïve 日本語 🙂\r\n\t x", "a  b\n\n c's"])
def test_any_text_survives_and_digits_stay_apart(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("1234")) == list("1234")


@pytest.mark.slow
def test_it_is_as_good_as_promised(model: PreTrainedModel, renderer: Qwen3Renderer) -> None:
    tasks, _ = make_tasks(100, 0, seed=5)
    episodes = play(model, renderer, tasks, generator=torch.Generator().manual_seed(0))
    assert 0.25 < success(episodes) < 0.5
    assert sum(len(episode.spans) for episode in episodes) / len(episodes) < 2.5


def test_saving_it_again_changes_nothing(tmp_path: Path, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    save(model, tokenizer, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in MODEL.iterdir()}
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == (MODEL / name).read_bytes(), name


@pytest.mark.slow
def test_plain_transformers_loads_and_runs_it_offline() -> None:
    script = f"""
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(MODEL)!r})
model = AutoModelForCausalLM.from_pretrained({str(MODEL)!r})
tool = {CALC_TOOL!r}
messages = [{{"role": "system", "content": {SYSTEM_PROMPT!r}}}, {{"role": "user", "content": "What is 12 * 7?"}}]
inputs = tokenizer.apply_chat_template(messages, tools=[tool], add_generation_prompt=True, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=64)[0, inputs["input_ids"].shape[1]:]
assert output[-1] == tokenizer.eos_token_id, tokenizer.decode(output)
print(model.config.model_type, tokenizer.decode(output))
"""
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=110
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("qwen3 ")


@pytest.mark.parametrize("alike", [0, 2, 5])
def test_the_first_turn_is_learnt_where_all_demonstrations_are_asked_the_same(alike: int) -> None:
    """What rows have in common is computed once, but not where the model speaks: `alike` tokens of its turn."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))
    prompt, rows = list(range(8)), list[tuple[list[int], list[int]]]()
    for n in range(3):
        ids = [*prompt, *range(20, 20 + alike), 30 + n, 40]
        rows.append((ids, [IGNORED] * 7 + ids[8:] + [IGNORED]))
    losses = [
        cross_entropy(model(torch.tensor([ids])).logits[0], torch.tensor(targets), reduction="sum")
        for ids, targets in rows
    ]
    expected = sum(losses) / (3 * (alike + 2))
    torch.testing.assert_close(demonstration_loss(model, rows), expected)
