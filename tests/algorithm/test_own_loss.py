"""A loss of one's own: by import path or as a function, checked before anything starts, computed by the learner."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError
from agentlightning.learner.catalog import LOSSES, LossSpec, as_loss, find_loss

from . import own_losses

PATH = "tests.algorithm.own_losses:plain"


@pytest.mark.parametrize("given", [PATH, own_losses.plain, LossSpec(PATH)], ids=["path", "function", "spec"])
def test_a_loss_by_path_or_function(given: Any) -> None:
    spec = as_loss(given)
    assert spec.path == PATH
    assert find_loss(spec.path) is own_losses.plain
    assert not spec.reference


@pytest.mark.slow
def test_what_a_loss_needs_it_says_itself() -> None:
    algorithm = agl.GRPO(model="calc", loss=LossSpec(PATH, reference=True, on_policy=True))
    assert algorithm.policy is not None
    assert algorithm.policy.model.reference == "calc"
    assert algorithm.loss_config().needs_reference
    with pytest.raises(ConfigError, match="gone through once"):
        agl.GRPO(model="calc", loss=LossSpec(PATH, on_policy=True), update_epochs=2)


@pytest.mark.quick_with("no_such_module")
@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("no_such_module:loss", "No module named 'no_such_module'"),
        ("tests.algorithm.own_losses:missing", "has no attribute 'missing'"),
        ("tests.algorithm.own_losses:of_one", "must be a function of"),
    ],
)
def test_a_loss_that_cannot_be_found_is_refused_at_once(path: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        agl.GRPO(model="calc", loss=path)


def test_a_function_without_an_import_path_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no import path.*losses\.py"):
        agl.GRPO(model="calc", loss=lambda entries, config: None)


@pytest.mark.slow
def test_a_loss_in_the_script_itself_is_refused_with_the_next_step(tmp_path: Path) -> None:
    script = "import agentlightning as agl\ndef mine(entries, config): ...\nagl.GRPO(model='calc', loss=mine)\n"
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "defined in the script that is run" in done.stderr
    assert "losses.py" in done.stderr


@pytest.mark.slow
def test_a_loss_in_a_file_beside_the_script_is_found(tmp_path: Path) -> None:
    """From another working directory: what counts is where the script looks for modules."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "losses.py").write_text("def mine(entries, config): ...\n")
    script = (
        "import agentlightning as agl, losses\nprint(agl.GRPO(model='calc', loss=losses.mine).loss_config().name)\n"
    )
    (tmp_path / "code" / "train.py").write_text(script)
    done = subprocess.run([sys.executable, "code/train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "losses:mine\n", done.stderr


def test_the_table_is_what_the_learner_finds() -> None:
    for name, spec in LOSSES.items():
        assert as_loss(name) is spec
        assert find_loss(name) is find_loss(spec.path)
        assert not spec.own
