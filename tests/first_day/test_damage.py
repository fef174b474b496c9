"""A run some of whose files are damaged: what is whole is named, before a model is loaded."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.checkpoint import CheckpointInfo, save_checkpoint
from agentlightning.errors import ModelError, StoreError
from agentlightning.metrics import SilentConsole
from agentlightning.models import resolve_model, shipped_models
from agentlightning.models.shape import read_shape
from agentlightning.models.weights import damage_of, damage_of_checkpoint
from agentlightning.trainer.folder import checkpoint_of

CALC = shipped_models()["calc"]


class Copies:
    """A backend that writes the shipped model."""

    async def checkpoint(self, path: str) -> None:
        shutil.copytree(CALC, Path(path) / "model")
        (Path(path) / "optimizer").mkdir()
        (Path(path) / "optimizer" / "optimizer.pt").write_bytes(b"moments")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two whole checkpoints."""
    (tmp_path / "run").mkdir()
    for step in (1, 2):
        info = CheckpointInfo(step=step, base_model="calc", seed=0)
        asyncio.run(save_checkpoint(tmp_path / "run", Copies(), info))  # pyright: ignore[reportArgumentType]
    return tmp_path / "run"


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def empty(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"")


def cut_off(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_in_the_header(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])


def other_bytes(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\xff" * 5000)


def a_pointer(model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n")


def a_part_is_missing(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}')


DAMAGES = [no_weights, empty, cut_off, cut_in_the_header, other_bytes, a_pointer, a_part_is_missing]


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-000002"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_names_the_older_one_that_is_whole(run: Path, damage: Callable[[Path], None]) -> None:
    algorithm = agl.GRPO(model="calc")
    assert checkpoint_of(algorithm, run, None) == newest(run)
    damage(newest(run) / "model")
    for ask in (lambda: checkpoint_of(algorithm, run, None), lambda: resolve_model(run)):
        with pytest.raises((agl.ConfigError, ModelError), match=r"An older one is whole: .*step-000001"):
            ask()
    assert damage_of_checkpoint(run / "checkpoints" / "step-000001") is None
    damage(run / "checkpoints" / "step-000001" / "model")
    assert "No older one is whole" in (damage_of_checkpoint(newest(run)) or "")


def test_an_optimizer_is_needed_to_go_on_and_not_to_serve(run: Path) -> None:
    (newest(run) / "optimizer" / "optimizer.pt").unlink()
    assert Path(resolve_model(run)).parent == newest(run)
    with pytest.raises(agl.ConfigError, match=r"optimizer is missing.*step-000001"):
        checkpoint_of(agl.GRPO(model="calc"), run, None)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_model_that_is_not_whole_is_said_to_be_so(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    from agentlightning.learner.policy import load_policy

    shutil.copytree(CALC, tmp_path / "mine")
    assert damage_of(tmp_path / "mine") is None
    damage(tmp_path / "mine")
    words = damage_of(tmp_path / "mine")
    assert words
    if damage is a_part_is_missing:
        return  # transformers takes the file that is there
    with pytest.raises(ModelError) as caught:
        load_policy(tmp_path / "mine")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"base_model_name_or_path": "/gone/base"}', ["holds an adapter (LoRA)", "/gone/base", "adapter_config.json"]),
        ('{"base_model_name_or_path": "openai/gpt-4o"}', ["holds an adapter (LoRA)", "openai/gpt-4o"]),
        ("{}", ["does not say base_model_name_or_path"]),
        ("{", ["does not say base_model_name_or_path"]),
    ],
)
def test_a_folder_with_an_adapter_alone(tmp_path: Path, config: str, words: list[str]) -> None:
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(ModelError) as caught:
        read_shape(tmp_path)
    for each in (*words, str(tmp_path)):
        assert each in str(caught.value)


@pytest.mark.parametrize("content", [b"no database" * 500, b"\x11" * 100])
@pytest.mark.parametrize("with_checkpoints", [True, False])
def test_a_damaged_store_beside_good_checkpoints(tmp_path: Path, content: bytes, with_checkpoints: bool) -> None:
    (tmp_path / "store.db").write_bytes(content)
    if with_checkpoints:
        (tmp_path / "checkpoints").mkdir()
    with pytest.raises(StoreError) as caught:
        agl.SqliteLightningStore(tmp_path / "store.db")
    assert (f"--resume {tmp_path}" in str(caught.value)) is with_checkpoints


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "curve.png"])
def test_another_file_of_a_run_is_no_damaged_store(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"step": 1, "reward": 0.5}\n' * 40)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(StoreError) as caught:
        agl.SqliteLightningStore(tmp_path / name)
    assert "Give a run's folder" in str(caught.value)
    assert "mv " not in str(caught.value)


def test_a_result_can_be_awaited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`await trainer.fit(…)`: the training is over by then, and must not be lost to a TypeError."""

    async def script() -> agl.RunResult:
        trainer = agl.Trainer(algorithm=agl.Baseline(), run_dir=tmp_path / "run", console=SilentConsole())
        return await trainer.fit(lambda task: 1.0, [1, 2])

    result = asyncio.run(script())
    assert result.run_dir == tmp_path / "run"
    assert "fit_async" in caplog.text


# ---- a model of another kind -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mymodel"}, "model_type 'mymodel', which transformers"),
        ({"model_type": "lama"}, "Did you mean 'llama'?"),
        ({"model_type": "mymodel", "auto_map": {"AutoConfig": "a.B"}}, "code of models is never run here"),
        ({"model_type": "t5"}, "'t5' is no kind of model that goes on with a text"),
        ({"model_type": "bert"}, "is an encoder (bert), which fills in words and does not write"),
        ({"model_type": None}, "its config.json has no model_type"),
        ({"model_type": "gpt2"}, "not those of its config.json: "),
        ({"tie_word_embeddings": False}, "lm_head.weight is missing (one of 1)"),
    ],
)
def test_a_config_that_is_not_that_of_the_weights(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    from agentlightning.learner.policy import load_policy

    model = shutil.copytree(CALC, tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        load_policy(str(model))
    assert words in str(caught.value)
    assert "Check that the directory is whole" not in str(caught.value)
