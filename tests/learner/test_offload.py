"""An optimiser that is kept on another device than the weights steps as one beside them, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from agentlightning.backend.base import ModelSpec
from agentlightning.backend.embedded.backend import settings_of
from agentlightning.errors import ConfigError
from agentlightning.learner.base import LearnerOptions, LossConfig, OptimParams
from agentlightning.learner.optimizer import Optimizer
from agentlightning.learner.packing import CreditedCall, pack
from agentlightning.learner.policy import load_policy
from agentlightning.learner.torch_learner import TorchLearner

STEP = OptimParams(learning_rate=1e-2, max_grad_norm=0.5, weight_decay=0.1, max_kl=1e-2)


class Offloaded(TorchLearner):
    """As on a GPU, with the CPU in its place."""

    def _make_optimizer(self) -> Optimizer:
        return Optimizer(self.policy.trainable(), keep_on="cpu")


def steps(learner: TorchLearner, calls: list[CreditedCall], count: int) -> list[dict[str, float]]:
    found = []
    for _ in range(count):
        for share in (0.5, None):  # two passes, whose halves are compared
            learner.forward_backward(pack(calls), LossConfig(name="reinforce"))
            if share is not None:
                learner.keep_half(share)
        done = learner.optim_step(STEP)
        found.append({"norm": done.grad_norm, **done.metrics})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_are_the_same_bit_for_bit(
    tiny_model_dir: Path, group_of_conversations: list[CreditedCall], tmp_path: Path, dtype: str
) -> None:
    def made(kind: Callable[..., TorchLearner], model: Path = tiny_model_dir) -> TorchLearner:
        return kind(load_policy(model, device="cpu", dtype=dtype))

    beside, apart = made(TorchLearner), made(Offloaded)
    first = steps(beside, group_of_conversations, 2)
    assert steps(apart, group_of_conversations, 2) == first
    assert any(step["halvings"] for step in first), "max_kl halved some"
    same(beside, apart)
    for kept, kind in ((beside, Offloaded), (apart, TorchLearner)):  # a resume with the other
        folder = tmp_path / kind.__name__
        kept.export(folder / "model")
        kept.save_state(folder / "state")
        resumed = made(kind, folder / "model")
        resumed.load_state(folder / "state")
        steps(kept, group_of_conversations, 1)
        steps(resumed, group_of_conversations, 1)
        same(kept, resumed)


def same(one: TorchLearner, other: TorchLearner) -> None:
    for mine, its in zip(one.policy.trainable(), other.policy.trainable(), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_is_on_the_cpu_and_what_computes_is_not(dtype: torch.dtype) -> None:
    """With tensors that have a device and no content: mixing devices is an error among them, as it is with a GPU's."""
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(4, 3, dtype=dtype, device="meta"))
        optimizer = Optimizer([weight], keep_on="cpu")
        for _ in range(2):
            weight.grad = torch.empty_like(weight)
            optimizer.gather()
            assert weight.grad is None, "the pass's gradient leaves the GPU"
        (gradient,) = optimizer.gradients()
        assert gradient is not None
        assert gradient.device.type == "cpu"
        torch.nn.utils.clip_grad_norm_(list(optimizer._stepped), 1.0)
        before = optimizer.weights()
        optimizer.step(STEP)
        optimizer.halve_step(before)
        state = optimizer.state()
        kept = [*before, *state["copies"], *state["adamw"]["state"][0].values()]
        assert {tensor.device.type for tensor in kept} == {"cpu"}
        assert weight.device.type == "meta"
        optimizer.load(state)
        assert {v.device.type for v in optimizer.state()["adamw"]["state"][0].values()} == {"cpu"}


def test_where_it_would_do_nothing_it_is_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="the model is on the CPU"):
        TorchLearner(load_policy(tiny_model_dir, device="cpu"), LearnerOptions(offload=True))
    with pytest.raises(ConfigError, match="offload is for one rank"):
        settings_of(ModelSpec(model="calc", offload=True, ranks=2))
