"""What is known of a model before it is loaded: its size, its learning rate, whether it fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import ModelError
from agentlightning.models import shipped_models
from agentlightning.models.hardware import memory_of, refuse_what_does_not_fit
from agentlightning.models.shape import read_shape, shape_of

# As the models' own config.json have them; parameters as their pages state them.
QWEN3_06B = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
LLAMA3_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize(("config", "parameters"), [(QWEN3_06B, 0.596e9), (LLAMA3_8B, 8.03e9)])
def test_parameters(config: dict[str, Any], parameters: float) -> None:
    assert shape_of(config).parameters == pytest.approx(parameters, rel=0.01)
    assert shape_of({"text_config": config, "vision_config": {}}) == shape_of(config)


def test_the_shipped_model() -> None:
    shape = read_shape("calc")
    assert shape is not None
    weights = (shipped_models()["calc"] / "model.safetensors").stat().st_size / 4
    assert shape.parameters == pytest.approx(weights, rel=0.01)
    assert (shape.hidden, shape.layers, shape.max_context) == (128, 3, 1024)


def test_the_learning_rate_falls_with_the_size_and_an_adapter_takes_twenty_times_as_much() -> None:
    tiny, small, large = read_shape("calc"), shape_of(QWEN3_06B), shape_of(LLAMA3_8B)
    assert tiny is not None
    rates = [shape.learning_rate(adapter=False) for shape in (tiny, small, large)]
    assert rates == [3.4e-4, 4.1e-6, 9.7e-7]
    assert large.learning_rate(adapter=True) == pytest.approx(20 * rates[2], rel=0.03)
    assert tiny.learning_rate(adapter=True) == 2e-3, "the base of an adapter has learned something"


def test_an_adapter_has_the_shape_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "calc"}))
    shape, base = read_shape(tmp_path), read_shape("calc")
    assert shape is not None
    assert base is not None
    assert shape.adapter
    assert shape.hidden == base.hidden
    assert shape.learning_rate(adapter=False) == base.learning_rate(adapter=True)


def test_a_configuration_that_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mystery"}')
    assert read_shape(tmp_path) is None


def test_bytes() -> None:
    shape = shape_of(QWEN3_06B)
    assert shape.training_bytes("float32", adapter=False) == 16 * shape.parameters
    assert shape.training_bytes("bfloat16", adapter=False) == 18 * shape.parameters, "float32 copies"
    assert shape.training_bytes("bfloat16", adapter=True) < 2.2 * shape.parameters


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    config = {**LLAMA3_8B, "num_hidden_layers": 8 * 32}  # 60 billion
    with pytest.raises(ModelError) as caught:
        refuse_what_does_not_fit("huge", shape_of(config), dtype="float32", device="cpu", adapter=False)
    for words in ("'huge' does not fit", "billion parameters", "AdamW's two moments", "GiB"):
        assert words in str(caught.value)
    refuse_what_does_not_fit(
        "small",
        shape_of(QWEN3_06B | {"num_hidden_layers": 1, "vocab_size": 10}),
        dtype="float32",
        device="cpu",
        adapter=False,
    )


def test_what_fits_as_an_adapter_is_named() -> None:
    memory, _ = memory_of("cpu")
    assert memory is not None
    layers = int(memory / 4 / 1.5 / (shape_of(LLAMA3_8B).parameters / 32))  # its weights fit, AdamW's moments do not
    big = shape_of({**LLAMA3_8B, "num_hidden_layers": layers, "vocab_size": 10})
    with pytest.raises(ModelError, match=r"lora_rank=16 takes .* GiB"):
        refuse_what_does_not_fit("big", big, dtype="float32", device="cpu", adapter=False)


def test_a_name_that_is_nowhere_is_answered_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"'models/qwen' could not be loaded.*no 'qwen' in it") as caught:
        read_shape("models/qwen")
    assert "HF_HUB_OFFLINE" in str(caught.value)


def test_a_hub_that_cannot_be_reached_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ModelError, match="cannot be reached from here"):
        read_shape("nobody/nothing")
