"""The optimiser's state in a checkpoint as a disk or somebody else left it: refused in our words, or loaded whole."""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentlightning.errors import ConfigError
from agentlightning.learner.base import OptimParams
from agentlightning.learner.policy import load_policy
from agentlightning.learner.torch_learner import STATE_FILE, TorchLearner
from scripts.damage import damaged


class Foreign:
    """What runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


def change(state: Any, what: Callable[[torch.Tensor], Any]) -> Any:
    """The state with each tensor of the moments changed."""
    for one in state["optimizer"]["adamw"]["state"].values():
        one.update({name: what(tensor) for name, tensor in one.items()})
    return state


def _put(file: Path, content: bytes) -> None:
    file.write_bytes(content)


WRITTEN: dict[str, Callable[[Any, Path], None]] = {
    "a foreign pickle": lambda state, file: _put(file, pickle.dumps(Foreign())),
    "a foreign archive": lambda state, file: torch.save(Foreign(), file),
    "empty": lambda state, file: _put(file, b""),
    "text": lambda state, file: _put(file, b"version https://git-lfs.github.com/spec/v1\n"),
    "a list": lambda state, file: torch.save([1, 2], file),
    "no version": lambda state, file: torch.save({"optimizer": state["optimizer"]}, file),
    "no moments": lambda state, file: torch.save({**state, "optimizer": {}}, file),
    "numbers": lambda state, file: torch.save({**state, "optimizer": 5}, file),
    "integers": lambda state, file: torch.save(change(state, lambda tensor: tensor.to(torch.int8)), file),
    "other shapes": lambda state, file: torch.save(change(state, lambda tensor: torch.zeros(3, 5)), file),
    "words": lambda state, file: torch.save(change(state, lambda tensor: "x"), file),
}


@pytest.fixture
def run(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """Two checkpoints; the learner has made a step, so that there are moments."""
    learner = TorchLearner(load_policy(tiny_model_dir, device="cpu"))
    for parameter in learner.policy.trainable():
        parameter.grad = torch.ones_like(parameter)
    learner._optimizer.step(OptimParams(learning_rate=0.001))  # pyright: ignore[reportPrivateUsage]
    for step in (1, 2):
        folder = tmp_path / "checkpoints" / f"step-00000{step}"
        shutil.copytree(tiny_model_dir, folder / "model")
        learner.save_state(folder / "optimizer")
        (folder / "checkpoint.json").write_text("{}")
    return tmp_path


def load(model: Path, run: Path) -> None:
    TorchLearner(load_policy(model, device="cpu")).load_state(run / "checkpoints" / "step-000002" / "optimizer")


def test_a_whole_one_is_loaded(tiny_model_dir: Path, run: Path) -> None:
    load(tiny_model_dir, run)


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_no_learner_wrote_is_refused(
    tiny_model_dir: Path, run: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    file = run / "checkpoints" / "step-000002" / "optimizer" / STATE_FILE
    WRITTEN[kind](torch.load(file, weights_only=True), file)
    with pytest.raises(ConfigError, match=r"An older one is whole: .*step-000001"):
        load(tiny_model_dir, run)
    assert not (run / "ran").exists()


@pytest.mark.slow
def test_what_a_disk_leaves_is_refused_or_loaded(tiny_model_dir: Path, run: Path) -> None:
    file = run / "checkpoints" / "step-000002" / "optimizer" / STATE_FILE
    whole, refused = file.read_bytes(), 0
    for seed in range(25):
        file.write_bytes(damaged(whole, random.Random(seed)))
        try:
            load(tiny_model_dir, run)
        except ConfigError as error:
            refused += 1
            assert "step-000001" in str(error)  # noqa: PT017 – some are loaded: bytes of tensors alone have changed
    assert refused > 5
