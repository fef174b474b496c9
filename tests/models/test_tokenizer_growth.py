"""Tokenizers that make texts longer without end are refused by name before they are loaded."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from agentlightning.errors import ModelError
from agentlightning.learner.policy import export_merged, tokenizer_of
from agentlightning.models import resolve_model
from agentlightning.rendering.tokenizer import load_tokenizer


def replace_all(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def in_turn(kind: str, *steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", kind: steps}


LONG = "a" * 20_000
WORD = {"id": 1, "single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
TABLE = base64.b64encode((4).to_bytes(4, "little") + bytes(4) + LONG.encode() + b"\0").decode()
PIECES = [{"Sequence": {"id": "A", "type_id": 0}}] * 40
TEMPLATE = {"type": "TemplateProcessing", "single": PIECES, "pair": PIECES, "special_tokens": {}}
GROWING: dict[str, tuple[str, Any]] = {
    "a long replacement": ("normalizer", replace_all(LONG, String="a")),
    "a long beginning": ("normalizer", {"type": "Prepend", "prepend": LONG}),
    "without its kind": ("normalizer", {"prepend": LONG}),
    "short ones in turn": ("normalizer", in_turn("normalizers", *[replace_all("aa", String="a")] * 40)),
    "more than a number holds": ("normalizer", in_turn("normalizers", *[{"type": "Prepend", "prepend": LONG}] * 200)),
    "nested": ("normalizer", in_turn("normalizers", in_turn("normalizers", replace_all(LONG, Regex=".")))),
    "between all characters": ("normalizer", in_turn("normalizers", *[replace_all("a", Regex="")] * 40)),
    "a table": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": TABLE}),
    "a decoder": ("decoder", in_turn("decoders", replace_all(LONG, String="a"), {"type": "Fuse"})),
    "a template": ("post_processor", TEMPLATE),
    "an added token": ("added_tokens", [{"content": LONG, **WORD}]),
    "a token": ("vocab", {"a": 0, LONG: 1}),
}
BOUNDED: dict[str, tuple[str, Any]] = {
    "as Llama 2 has it": (
        "normalizer",
        in_turn("normalizers", {"type": "Prepend", "prepend": "▁"}, replace_all("▁", String=" ")),
    ),
    "as XLNet has it": (
        "normalizer",
        in_turn("normalizers", replace_all('"', String="``"), replace_all(" ", Regex=" {2,}"), {"type": "NFKD"}),
    ),
    "a longer one by one": ("normalizer", replace_all("a" * 900, String="a" * 900)),
    "many added tokens": ("added_tokens", [{"content": f"<extra_{n}>", **WORD, "id": 1 + n} for n in range(2_000)]),
    "a token as Claude has it": ("vocab", {"a": 0, "Ġ" * 1_024: 1}),
}


def written(folder: Path, part: str, value: Any) -> Path:
    """A directory with a tokenizer of which one part is this."""
    made = json.loads(Tokenizer(BPE(vocab={"a": 0}, merges=[])).to_str())
    (made["model"] if part == "vocab" else made)[part] = value
    (folder / "tokenizer.json").write_text(json.dumps(made))
    return folder


@pytest.mark.parametrize("name", GROWING)
def test_a_tokenizer_that_lets_texts_grow_is_refused(name: str, tmp_path: Path) -> None:
    part, value = GROWING[name]
    folder = written(tmp_path, part, value)
    for load in (load_tokenizer, tokenizer_of):
        with pytest.raises(
            ModelError, match=rf"tokenizer\.json is refused: its {part} may make a text more than [\d,]+ times"
        ):
            load(str(folder))


@pytest.mark.parametrize("name", BOUNDED)
def test_other_tokenizers_are_loaded(name: str, tmp_path: Path) -> None:
    assert load_tokenizer(str(written(tmp_path, *BOUNDED[name]))).encode("a") is not None


def test_the_shipped_models_are_loaded() -> None:
    assert load_tokenizer(resolve_model("calc")).encode("2 + 2")


@pytest.mark.parametrize("content", ["[" * 100_000, '{"model": 1}', '{"added_tokens": 3}', "\0"])
def test_what_is_no_tokenizer_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(str(tmp_path))


def test_a_model_with_sizes_that_contradict_each_other_is_not_merged(tmp_path: Path) -> None:
    source = shutil.copytree(resolve_model("calc"), tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    with pytest.raises(ModelError, match="num_hidden_layers is 1000000000, which no model has"):
        export_merged(source, tmp_path / "to")
    assert not (tmp_path / "to").exists()
