"""The learner on a GPU: FlexAttention's own kernel, an optimiser in the CPU's memory, passes that can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from agentlightning.learner.base import LearnerOptions, LossConfig
from agentlightning.learner.packing import CreditedCall, pack
from agentlightning.learner.policy import Policy, load_policy
from agentlightning.learner.rank_learner import RankLearner
from agentlightning.learner.torch_learner import TorchLearner
from tests.learner.conftest import MakeCall
from tests.learner.test_flex_tree import FLEX, LOSS, SEGMENTS, TREES, branching, by_checkpoints, compare, error, learned
from tests.learner.test_offload import STEP, steps

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture
def on_gpu(tiny_model_dir: Path) -> Policy:
    return load_policy(tiny_model_dir, device="cuda")


@pytest.mark.parametrize("name", TREES)
def test_its_kernel_has_the_numbers_of_segments_and_of_rows(on_gpu: Policy, make_call: MakeCall, name: str) -> None:
    batch = pack(TREES[name](np.random.default_rng(3), make_call))
    found, expected = learned(on_gpu, batch, FLEX), learned(on_gpu, batch, SEGMENTS)
    compare(found, expected, 5e-5)
    compare(found, learned(on_gpu, batch, SEGMENTS, rows=True), 5e-5)


def test_a_gpu_has_the_numbers_of_a_cpu(on_gpu: Policy, policy: Policy, make_call: MakeCall) -> None:
    for seed in range(6):
        batch = pack(branching(np.random.default_rng(seed), make_call))
        compare([t.cpu() for t in learned(on_gpu, batch, FLEX)], learned(policy, batch, SEGMENTS), 1e-4)


def test_one_kernel_for_trees_of_every_size(on_gpu: Policy, make_call: MakeCall) -> None:
    from torch._dynamo.utils import counters

    def kernels(seeds: range) -> int:
        for seed in seeds:
            learned(on_gpu, pack(branching(np.random.default_rng(seed), make_call)), FLEX)
        return counters["stats"]["unique_graphs"]

    first = kernels(range(2))
    assert kernels(range(2, 14)) == first


def test_an_adapter_with_gradient_checkpointing(tiny_model_dir: Path, make_call: MakeCall) -> None:
    compare(*by_checkpoints(tiny_model_dir, make_call, "cuda"), 5e-5)


def test_bfloat16_within_its_rounding(tiny_model_dir: Path, on_gpu: Policy, make_call: MakeCall) -> None:
    batch = pack(branching(np.random.default_rng(1), make_call))
    exact = learned(on_gpu, batch, SEGMENTS)
    short = load_policy(tiny_model_dir, device="cuda", dtype="bfloat16")
    ours, theirs = (error(learned(short, batch, options), exact) for options in (FLEX, SEGMENTS))
    assert theirs < 0.2
    assert ours < 1.5 * theirs


@pytest.mark.parametrize("options", [FLEX, SEGMENTS], ids=["flex", "segments"])
def test_a_pass_again_has_the_same_bits(on_gpu: Policy, make_call: MakeCall, options: LearnerOptions) -> None:
    """What `deterministic` promises of a run rests on it."""
    batch = pack(branching(np.random.default_rng(5), make_call))
    first = learned(on_gpu, batch, options)
    names = ["hidden states", "log-probs", *(name for name, p in on_gpu.model.named_parameters() if p.requires_grad)]
    for _ in range(4):
        again = learned(on_gpu, batch, options)
        assert [n for n, a, b in zip(names, again, first, strict=True) if not torch.equal(a, b)] == []


def test_what_is_there_by_default_is_the_kernel(on_gpu: Policy, make_call: MakeCall) -> None:
    learner = TorchLearner(on_gpu, LearnerOptions())
    batch = pack(branching(np.random.default_rng(1), make_call))
    learner.forward_backward(batch, LOSS)
    assert (learner.rows, learner.options.tree_attention) == (False, "auto")
    assert learner.check_packing(batch, LOSS).holds


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_optimiser_in_the_memory_of_the_cpu(
    tiny_model_dir: Path, group_of_conversations: list[CreditedCall], dtype: str
) -> None:
    """The same steps, except for the rounding of another processor, and its tensors are not on the GPU."""

    def made(*, offload: bool) -> TorchLearner:
        return TorchLearner(load_policy(tiny_model_dir, device="cuda", dtype=dtype), LearnerOptions(offload=offload))

    beside, apart = made(offload=False), made(offload=True)
    close: Callable[..., None] = np.testing.assert_allclose
    for mine, its in zip(*(steps(one, group_of_conversations, 2) for one in (apart, beside)), strict=True):
        for name in its:
            close(mine[name], its[name], rtol=0.05 if dtype == "bfloat16" else 1e-3, err_msg=name)
    compare(apart.policy.trainable(), beside.policy.trainable(), 0.02 if dtype == "bfloat16" else 1e-4)
    kept = [v for one in apart.state()["optimizer"]["adamw"]["state"].values() for v in one.values()]
    assert {tensor.device.type for tensor in kept} == {"cpu"}


def test_a_rank_alone_over_nccl(
    tiny_model_dir: Path, group_of_conversations: list[CreditedCall], tmp_path: Path
) -> None:
    """FSDP2 with all that it does for several: the steps of the plain learner."""

    def made() -> Policy:
        return load_policy(tiny_model_dir, device="cuda")

    expected = steps(TorchLearner(made()), group_of_conversations, 2)
    meeting = f"file://{tmp_path / 'meeting'}"
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", init_method=meeting, rank=0, world_size=1)
    try:
        gpus = [""]
        torch.distributed.all_gather_object(gpus, "a GPU")
        assert gpus == ["a GPU"]
        learner = RankLearner(made(), LearnerOptions())
        norms = []
        for _ in expected:
            for _ in range(2):
                learner.forward_backward(pack(group_of_conversations), LossConfig(name="reinforce"))
            norms.append(learner.optim_step(STEP).grad_norm)
        assert norms == pytest.approx([step["norm"] for step in expected], rel=1e-3)
    finally:
        torch.distributed.destroy_process_group()
