"""A model's folder made to do harm: it is refused in words, within limits of time and memory that the system sets."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import Split

from agentlightning.errors import ModelError
from agentlightning.models import resolve_model
from agentlightning.models.shape import read_shape, refuse_sizes, shape_of
from agentlightning.models.weights import damage_of
from agentlightning.rendering.tokenizer import FileTokenizer, load_tokenizer, stop_tokens

SECONDS = 60
MEMORY = 6 * 2**30
"""Of addresses: torch alone takes some four."""
LOADS = """
import sys
from agentlightning.errors import ModelError
from agentlightning.learner.policy import load_policy
try:
    load_policy(sys.argv[1], device="cpu")
except ModelError as error:
    sys.exit(f"refused: {error}")
"""


def changed(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **values}))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(resolve_model("calc"), tmp_path / "model")


def loaded(folder: Path) -> str:
    """What a process of its own says that loads the model: it may take no more than a minute, and no more memory."""
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(folder)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
    )
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    return done.stderr


def sparse(file: Path) -> None:
    file.unlink(missing_ok=True)
    with file.open("wb") as opened:
        opened.truncate(2**40)


def pipe(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def endless(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to("/dev/zero")


def long_header(file: Path) -> None:
    header = b"{}" + b" " * (80 * 2**20)
    file.write_bytes(len(header).to_bytes(8, "little") + header)


ODD_FILES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "settings without an end": ("generation_config.json", endless, "is no regular file"),
    "a terabyte of tokens": ("added_tokens.json", sparse, "has 1,099,511,627,776 bytes"),
    "a template in a pipe": ("chat_template.jinja", pipe, "is no regular file"),
    "weights in a pipe": ("model.safetensors", pipe, "is no regular file"),
    "weights without an end": ("model.safetensors", endless, "is no regular file"),
    "a header of 80 MB": ("model.safetensors", long_header, "is cut off or is no safetensors file"),
}


@pytest.mark.parametrize("name", ODD_FILES)
def test_an_odd_file_is_named_before_a_library_reads_it(name: str, model: Path) -> None:
    file, make, words = ODD_FILES[name]
    assert damage_of(model) is None
    make(model / file)
    assert f"{file} {words}" in (damage_of(model) or "")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a terabyte of tokens", "a header of 80 MB"])
def test_such_a_model_is_refused_by_what_would_load_it(name: str, model: Path) -> None:
    file, make, words = ODD_FILES[name]
    make(model / file)
    assert f"{file} {words}" in loaded(model)


SIZES: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers is 1000000000, which no model"),
    "more layers than weights": ({"num_hidden_layers": 10**5, "layer_types": None}, "says 19.7 billion parameters"),
    "labels": ({"num_labels": 10**8}, "num_labels is 100000000, which no model has"),
    "width": ({"hidden_size": 2**31}, "hidden_size is 2147483648, which no model has"),
    "words": ({"vocab_size": 2**40}, "vocab_size is 1099511627776, which no model has"),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_no_model_has_are_refused(name: str, model: Path) -> None:
    refuse_sizes(model)
    values, words = SIZES[name]
    changed(model / "config.json", **values)
    with pytest.raises(ModelError, match=words):
        refuse_sizes(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_such_sizes_ask_for_no_memory(name: str, model: Path) -> None:
    values, words = SIZES[name]
    changed(model / "config.json", **values)
    assert words in loaded(model)


@pytest.mark.parametrize(
    "values",
    [
        *({"hidden_size": size} for size in ("1" * 10**6, -1, 0, [1], True, None, 2**70, 1.5)),
        *({"text_config": config} for config in ([1], "x", 5)),
    ],
)
def test_odd_sizes_are_no_shape(values: dict[str, Any], model: Path) -> None:
    changed(model / "config.json", head_dim=2**20, **values)
    assert read_shape(str(model)) is None


def test_sizes_that_count_nothing_are_left_out(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    given = {**config, "num_experts": 0, "max_position_embeddings": "x"}
    assert (shape_of(given).parameters, shape_of(given).max_context) == (shape_of(config).parameters, None)


@pytest.mark.parametrize("base", [".", "a" * 100_000, "\0"])
def test_a_base_that_is_no_model_is_named(model: Path, base: str) -> None:
    (model / "config.json").unlink()
    changed(model / "adapter_config.json", base_model_name_or_path=str(model) if base == "." else base)
    with pytest.raises(ModelError, match="an adapter itself" if base == "." else "does not say|There is no model"):
        read_shape(str(model))


@pytest.mark.parametrize("values", [{"r": 2**22}, {"r": "x"}, {"r": 8, "rank_pattern": {"q_proj": 2**31}}])
def test_a_rank_for_which_there_are_no_weights_is_named(model: Path, values: dict[str, Any]) -> None:
    changed(model / "adapter_config.json", base_model_name_or_path="calc", r=8)
    assert damage_of(model) is None
    changed(model / "adapter_config.json", **values)
    assert "has the rank" in (damage_of(model) or "")


EXPRESSIONS = {
    "exponential": r"(a+)+$x|(a+)+b",
    "of a power": r"\p{L}*\p{L}*\p{L}*\p{L}*[^\p{L}]\d",
    "of its own characters": r"(q+)+[^q]\d",
}


@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer"])
def test_an_expression_that_takes_for_ever_is_refused(name: str, part: str, tmp_path: Path) -> None:
    made, expression = Tokenizer(BPE(vocab={"a": 0}, merges=[])), Regex(EXPRESSIONS[name])
    made.normalizer = Replace(expression, "a") if part == "normalizer" else None  # pyright: ignore[reportAttributeAccessIssue]
    made.pre_tokenizer = Split(expression, "isolated") if part != "normalizer" else None  # pyright: ignore[reportAttributeAccessIssue]
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"tokenizer\.json (is refused: it takes more|cannot be used: Onig)"):
        load_tokenizer(str(tmp_path))


def test_a_panic_of_the_library_is_a_model_error(model: Path) -> None:
    """One text may need more of an expression than those that were tried: who encodes it goes on."""
    content = json.loads((model / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "Zebra(a+)+[^a]\\d"}, "content": "b"}
    (model / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(model))
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be used: Onig"):
        tokenizer.encode("Zebra" + "a" * 200 + " x 1")
    assert tokenizer.encode("2 + 2")


def test_a_file_that_panics_while_it_is_read(model: Path) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    content["model"]["continuing_subword_prefix"] = "a" * 9_999
    (model / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be used"):
        load_tokenizer(str(model))


@pytest.mark.slow
def test_nor_does_such_a_file_end_the_process_of_the_model(model: Path) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    content["model"]["continuing_subword_prefix"] = "a" * 9_999
    (model / "tokenizer.json").write_text(json.dumps(content))
    assert "cannot be used" in loaded(model)


@pytest.mark.parametrize("token", [5, [1], {"x": 5}, {"content": [1]}])
def test_a_special_token_that_is_no_text_is_named(model: Path, token: Any) -> None:
    changed(model / "tokenizer_config.json", eos_token=token)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json has no text as its eos_token"):
        load_tokenizer(str(model))


@pytest.mark.parametrize("ids", [-1, "x", [[1]], {"a": 1}, 2**70, 1.5, True, [1, None]])
def test_an_end_that_is_no_token_is_named(model: Path, ids: Any) -> None:
    changed(model / "generation_config.json", eos_token_id=ids)
    with pytest.raises(ModelError, match="is no token's id"):
        stop_tokens(str(model))


@pytest.mark.parametrize("template", [5, [1, 2], {"default": "x"}, [{"name": "default", "template": 5}], [{}]])
def test_a_chat_template_that_is_no_text_is_named(model: Path, template: Any) -> None:
    (model / "chat_template.jinja").unlink()
    changed(model / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ModelError, match=r"The chat template \(.*\) cannot be read"):
        _ = FileTokenizer(model, "m").chat_template
