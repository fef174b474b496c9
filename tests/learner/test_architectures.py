"""Architectures that do something of their own: their log-probs and gradients are those of their own forward."""

from __future__ import annotations

import logging
import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "architectures.py"))


@pytest.fixture(autouse=True)
def quiet() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


@pytest.mark.parametrize(
    ("name", "learner", "why"),
    [
        ("minicpm3", "tree", ""),  # divides hidden states before its head
        ("falcon_h1", "rows", ""),  # multiplies logits
        ("nemotron", "rows", "does not pass the tree on"),
        ("llama4_text", "rows", "chunks"),  # its get_decoder is the model itself
        ("modernbert-decoder", "rows", "sliding window is 16"),  # its get_decoder is its head
        ("doge", "rows", "makes its own attention mask"),
        ("gpt_oss", "rows", "sliding window is 16"),
    ],
)
def test_what_is_learned_from_is_the_models_own_forward(name: str, learner: str, why: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, of configurations this small
        found, reason = SCRIPT["try_learner"](SCRIPT["build"](name))
    assert found == learner
    assert why in reason


def test_a_model_that_nothing_can_compute_is_refused(policy: Any, make_call: Any) -> None:
    """Its forward does more after its decoder than can be asked for with given hidden states."""
    import numpy as np

    from agentlightning.errors import ModelError
    from agentlightning.learner.packing import pack
    from agentlightning.learner.torch_learner import TorchLearner

    class Odd(type(policy.model)):
        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            found = super().forward(input_ids, **kwargs)
            found.logits = found.logits + 2.0 * torch.nn.functional.one_hot(input_ids, found.logits.shape[-1])
            return found

    policy.model = Odd(policy.model.config).eval()
    learner = TorchLearner(policy)
    tokens = np.arange(3, 9, dtype=np.int32)
    with pytest.raises(ModelError, match="cannot be trained here: computed as rows, its log-probs differ"):
        learner.forward(pack([make_call(tokens, tokens)]))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_table_of_architectures_is_what_is_found() -> None:
    """Made anew by `python scripts/architectures.py`. Tries every architecture."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = list(SCRIPT["verdicts"](SCRIPT["names"]()))
    finally:
        logging.disable(logging.NOTSET)
    assert [v for v in found if v.learner == "WRONG"] == []
    page = (ROOT / "docs" / "architectures.md").read_text()
    rows = dict(re.findall(r"^\| `(\S+)` \| (\w[\w ]* \| \w[\w ]*) \|", page, flags=re.M))
    # A gap just above what is allowed is below it on another processor.
    gaps = re.findall(r"^\| `(\S+)` \|.* differ by (\S+) from those of a plain forward", page, flags=re.M)
    gaps += [
        (v.name, gap) for v in found for gap in re.findall(r"differ by (\S+) from those of a plain forward", v.why)
    ]
    close = {name for name, gap in gaps if float(gap) < 3e-5}
    assert {name: row for name, row in rows.items() if name not in close} == {
        v.name: f"{v.learner} | {v.engine}" for v in found if v.name not in close
    }
    assert set(rows) == {v.name for v in found}
