"""How far gated delta nets amplify rounding: a gap to the model's own forward is none where that is as unsure."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import agentlightning as agl
from agentlightning.learner.packing import pack
from agentlightning.learner.policy import Policy
from agentlightning.learner.torch_learner import TorchLearner
from scripts.architectures import build, conversations, plain

LARGE = 20
"""Times the random weights of the table of architectures."""


def large(name: str) -> PreTrainedModel:
    model = build(name)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_((LARGE - 1) * 0.05 * torch.randn_like(parameter))
    return model


def own_forward(model: PreTrainedModel) -> np.ndarray:
    with torch.no_grad():
        found = [plain(model, c.call.prompt_ids, c.call.response_ids) for c in conversations()]
    return torch.cat(found).numpy()


def moved_by_rounding(model: PreTrainedModel) -> float:
    """How far its log-probs move when its weights move by as much as float32 rounds them."""
    other = copy.deepcopy(model)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 1e-7 * torch.randn_like(parameter))
    return float(np.abs(own_forward(model) - own_forward(other)).max())


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_the_gap_of_delta_nets_is_what_rounding_makes_of_the_models_own_forward(name: str) -> None:
    model = large(name)
    own = TorchLearner(Policy("", model, cast(Any, None), (2,))).forward(pack(conversations()))
    gap = float(np.abs(own - own_forward(model)).max())
    unsure = moved_by_rounding(model)
    assert gap < 5 * unsure
    assert gap < 1e-2, "the limit of the family"
    assert unsure > 5 * moved_by_rounding(large("qwen3")), "attention alone is better conditioned"


@pytest.mark.parametrize(("own", "limit"), [({}, 1e-3), ({"linear_key_head_dim": 8}, 1e-2)])
def test_the_limit_is_that_of_the_family(tmp_path: Path, own: dict[str, int], limit: float) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **own}))
    assert agl.GRPO(model=str(tmp_path), dtype="float32").logprob_gap_limit == limit
    assert agl.GRPO(model=str(tmp_path), dtype="bfloat16").logprob_gap_limit == 0.5
    assert agl.GRPO(model=str(tmp_path), dtype="float32", max_logprob_gap=0.1).logprob_gap_limit == 0.1
