"""Which device is taken, and that nothing on the way needs what Apple's GPU (`mps`) has not: float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentlightning.backend.embedded.ranks import device_of
from agentlightning.engine.base import SamplingParams
from agentlightning.engine.events import Failed, Request
from agentlightning.engine.torch_engine import TorchEngine
from agentlightning.errors import ConfigError
from agentlightning.learner import forward
from agentlightning.learner.base import LearnerOptions, LossConfig, OptimParams
from agentlightning.learner.catalog import LOSSES
from agentlightning.learner.packing import CreditedCall, pack
from agentlightning.learner.policy import Policy, pick_device
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.models import hardware

Have = Callable[..., None]


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch) -> Have:
    def set_up(*, cuda: bool = False, mps: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 * cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return set_up


def test_auto_is_cuda_then_apples_gpu_then_the_processor(have: Have) -> None:
    for cuda, mps, taken in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        have(cuda=cuda, mps=mps)
        assert pick_device("auto").type == taken
        assert pick_device("auto", "bfloat16").type == taken


def test_float64_is_not_computed_on_apples_gpu(have: Have) -> None:
    have(mps=True)
    assert pick_device("auto", "float64").type == "cpu"
    with pytest.raises(ConfigError, match="'mps' computes no float64"):
        pick_device("mps", "float64")


def test_apples_gpu_is_refused_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match="The device 'mps' cannot be used"):
        pick_device("mps")


def test_several_ranks_meet_on_cuda_or_on_the_processor(have: Have) -> None:
    have(mps=True)
    assert device_of("auto", 1) == "cpu"
    with pytest.raises(ConfigError, match="not on 'mps'"):
        device_of("mps", 0)
    have(cuda=True)
    assert [device_of("auto", rank) for rank in (0, 1, 2)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert device_of("cuda:1", 0) == "cuda:1"


def test_trees_are_computed_by_segments_on_apples_gpu() -> None:
    assert not forward.takes_flex(LearnerOptions(), torch.device("mps"))


def test_memory_that_a_gpu_shares_is_the_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a Mac: no `nvidia-smi`, and no /proc."""
    monkeypatch.setattr(hardware, "_gpu_memory", lambda: None)
    monkeypatch.setattr(hardware, "_MEMINFO", tmp_path / "none")
    for device in ("auto", "mps", "cpu"):
        found, where = hardware.memory_of(device)
        assert found is not None
        assert found > 1 << 28
        assert where == "this machine"


class NoFloat64(TorchDispatchMode):
    """Every operation on or to float64 is an error, as it is on that device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, made)):
            assert not (isinstance(value, torch.Tensor) and value.dtype == torch.float64), func
        return made


def test_sampling_needs_no_float64(policy: Policy) -> None:
    engine = TorchEngine(policy.model, policy.tokenizer, policy.eos_ids, seed=0, max_context=64, max_concurrency=4)
    settings = (
        SamplingParams(max_tokens=4, top_logprobs=2),
        SamplingParams(max_tokens=4, top_p=0.8),
        SamplingParams(max_tokens=4, min_p=0.1, temperature=0.7),
        SamplingParams(max_tokens=4, temperature=0.0, logit_bias={5: 3.0}),
    )
    for number, params in enumerate(settings):
        engine.submit(Request(request_id=number, prompt_ids=np.arange(9, dtype=np.int32), params=params))
    with NoFloat64():
        while engine.active:
            assert not any(isinstance(event, Failed) for event in engine.step())


@pytest.mark.quick_with("ppo_clip", "gspo", "dual_clip")
@pytest.mark.parametrize("loss", sorted(name for name, spec in LOSSES.items() if not spec.pairs))
def test_learning_needs_no_float64(policy: Policy, group_of_conversations: list[CreditedCall], loss: str) -> None:
    learner = TorchLearner(policy)
    with NoFloat64():
        learner.forward_backward(pack(group_of_conversations), LossConfig(name=loss, entropy_coef=0.01))
        learner.optim_step(OptimParams(learning_rate=1e-3, max_grad_norm=0.5, max_kl=1e-3))
