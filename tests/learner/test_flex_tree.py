"""FlexAttention's block mask for trees: the numbers of segments and of separate rows, and no block more than needed.

A GPU's kernel is not run here. On a CPU the learner writes the mask out; FlexAttention itself is compared with that, by
the kernel that torch compiles for CPUs, which skips blocks, and by its own plain computation, which has a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentlightning.learner import forward, tree_attention
from agentlightning.learner.base import LearnerOptions, LossConfig, PackedBatch
from agentlightning.learner.packing import CreditedCall, pack
from agentlightning.learner.policy import LoraSpec, Policy, load_policy
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.learner.tree_attention import BLOCK, block_mask, plan_flex, plan_tree, subtree_ends
from agentlightning.types.call import Int32Array

from .conftest import MakeCall

CPU = torch.device("cpu")
FLEX, SEGMENTS = LearnerOptions(tree_attention="flex"), LearnerOptions(tree_attention="segments")
Numbers = tuple[torch.Tensor, ...]
LOSS = LossConfig(name="gspo", clip_low=0.3, clip_high=0.3, entropy_coef=0.1)


# ---- trees -----------------------------------------------------------------------------------------------------------


def tokens(rng: np.random.Generator, n: int) -> Int32Array:
    return rng.integers(0, 250, n).astype(np.int32)


def deep(rng: np.random.Generator, make_call: MakeCall) -> list[CreditedCall]:
    """A conversation whose history was cut back before each turn: every segment but one has another below."""
    history, calls = tokens(rng, 140), []
    for turn in range(12):
        response = tokens(rng, 9)
        calls.append(make_call(history, response, sequence=turn, advantage=(-1.0) ** turn))
        history = np.concatenate([history, response[:5], tokens(rng, 11)])
    return calls


def wide(rng: np.random.Generator, make_call: MakeCall) -> list[CreditedCall]:
    """Forty responses of 1 to 20 tokens to one prompt."""
    prompt = tokens(rng, 50)
    return [make_call(prompt, tokens(rng, 1 + i % 20), sequence=i, advantage=1.0 - 0.1 * i) for i in range(40)]


def single(rng: np.random.Generator, make_call: MakeCall) -> list[CreditedCall]:
    """One segment of exactly two blocks."""
    return [make_call(tokens(rng, 2 * BLOCK - 30), tokens(rng, 30))]


def rows(rng: np.random.Generator, make_call: MakeCall) -> list[CreditedCall]:
    """Calls that share nothing, some longer than a block."""
    lengths = (5, 150, 31, 290, 64)
    return [
        make_call(np.append(np.int32(i), tokens(rng, n)), tokens(rng, 6), sequence=i) for i, n in enumerate(lengths)
    ]


def branching(rng: np.random.Generator, make_call: MakeCall) -> list[CreditedCall]:
    """Random: each call goes on from some point of an earlier one, anywhere in it."""
    histories, calls = [tokens(rng, int(rng.integers(1, 200)))], []
    for number in range(int(rng.integers(3, 12))):
        base = histories[int(rng.integers(len(histories)))]
        prompt = np.concatenate([base[: int(rng.integers(1, len(base) + 1))], tokens(rng, int(rng.integers(1, 90)))])
        response = tokens(rng, int(rng.integers(1, 40)))
        calls.append(make_call(prompt, response, sequence=number, advantage=float(rng.normal())))
        histories.append(np.concatenate([prompt, response]))
    return calls


TREES = {"deep": deep, "wide": wide, "single": single, "rows": rows, "branching": branching}


def attended(batch: PackedBatch) -> np.ndarray:
    """Which token attends to which, bool [N, N], by walking up from each segment."""
    ends_S = np.append(batch.starts_S[1:], len(batch.ids_N))
    found = np.zeros((len(batch.ids_N), len(batch.ids_N)), dtype=bool)
    for segment, (start, end) in enumerate(zip(batch.starts_S, ends_S, strict=True)):
        found[start:end, start:end] = np.tri(end - start, dtype=bool)
        while (segment := int(batch.parents_S[segment])) >= 0:
            found[start:end, batch.starts_S[segment] : ends_S[segment]] = True
    return found


# ---- the mask --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TREES)
def test_the_mask_is_the_tree_and_its_blocks_are_those_that_are_needed(name: str, make_call: MakeCall) -> None:
    for seed in range(4):
        batch = pack(TREES[name](np.random.default_rng(seed), make_call))
        count = len(batch.ids_N)
        plan = plan_flex(batch, CPU)
        assert plan.dense_PP is not None
        size = len(plan.dense_PP)
        assert size % BLOCK == 0
        wanted = np.eye(size, dtype=bool)  # padding attends to itself, so that no sum is of nothing
        wanted[:count, :count] = attended(batch)
        assert (plan.dense_PP.numpy() == wanted).all()
        by_block = wanted.reshape(size // BLOCK, BLOCK, size // BLOCK, BLOCK)
        assert (blocks(plan.blocks, full=True) == by_block.all((1, 3))).all()
        assert (blocks(plan.blocks, full=False) == by_block.any((1, 3)) & ~by_block.all((1, 3))).all()


def blocks(mask: Any, *, full: bool) -> np.ndarray:
    """Which blocks a kernel takes as full, or computes with the mask: for keys of queries and for queries of keys."""
    prefix = "full_" if full else ""
    found = []
    for side in ("kv", "q"):
        numbers, which = (getattr(mask, f"{prefix}{side}_{part}")[0, 0].numpy() for part in ("num_blocks", "indices"))
        table = np.zeros(which.shape, dtype=bool)
        for row, (number, columns) in enumerate(zip(numbers, which, strict=True)):
            table[row, columns[:number]] = True
        found.append(table)
    assert (found[0] == found[1].T).all()
    return found[0]


def test_siblings_are_not_computed_together(make_call: MakeCall) -> None:
    """Eight long responses to one prompt: blocks as for the prompt once, and each response with itself and it."""
    rng = np.random.default_rng(0)
    prompt = tokens(rng, 4 * BLOCK)
    mask = plan_flex(pack([make_call(prompt, tokens(rng, 2 * BLOCK), sequence=i) for i in range(8)]), CPU).blocks
    computed = sum(blocks(mask, full=full).sum() for full in (True, False))
    causal = sum(range(1, 4 + 8 * 2 + 1))
    assert computed == 4 * 5 // 2 + 8 * (2 * 4 + 3)
    assert computed < causal / 2


def test_rows_that_share_nothing_cost_what_they_would_alone(make_call: MakeCall) -> None:
    rng = np.random.default_rng(0)
    calls = [make_call(tokens(rng, 3 * BLOCK - 10), tokens(rng, 10), sequence=i) for i in range(6)]
    mask = plan_flex(pack(calls), CPU).blocks
    assert sum(blocks(mask, full=full).sum() for full in (True, False)) == 6 * (1 + 2 + 3)


def test_segments_that_do_not_lie_depth_first_are_refused(make_call: MakeCall) -> None:
    import msgspec

    batch = pack(wide(np.random.default_rng(0), make_call))
    parents = batch.parents_S.copy()
    parents[3] = 1  # with 2, which does not stand on 1, before it
    with pytest.raises(ValueError, match="depth first"):
        subtree_ends(msgspec.structs.replace(batch, parents_S=parents))


def test_a_mask_is_made_on_the_device_that_computes() -> None:
    """On a device whose tensors have no content: mixing devices is an error there, as it is on a GPU."""
    meta = torch.device("meta")
    mask = block_mask(np.arange(1, 301, dtype=np.int32), meta)
    index = torch.zeros(4, dtype=torch.int32, device=meta)
    assert mask.mask_mod(index, index, index, index).device == meta
    assert {t.device for t in vars(mask).values() if isinstance(t, torch.Tensor)} == {meta}


# ---- FlexAttention itself --------------------------------------------------------------------------------------------


def queries(count: int, *, size: int = 16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, count, size) for heads in (4, 2, 2)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch's compiler, which hides it elsewhere
def test_its_own_plain_computation_agrees_with_segments_and_so_do_gradients(
    make_call: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch refuses gradients on a CPU because it has no kernel for them there; its plain computation has them."""
    import torch.nn.attention.flex_attention as flex

    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_warn_once", lambda *_, **__: None)
    batch = pack(branching(np.random.default_rng(2), make_call))
    inputs = [t.requires_grad_() for t in queries(len(batch.ids_N))]
    plan = plan_flex(batch, CPU)
    padded = [torch.nn.functional.pad(t, (0, 0, 0, plan.blocks.shape[-1] - t.shape[2])) for t in inputs]
    out: Any = flex.flex_attention(*padded, block_mask=plan.blocks, scale=0.3, enable_gqa=True)  # pyright: ignore
    expected = plan_tree(batch, CPU).attend(*inputs, 0.3)  # pyright: ignore[reportCallIssue]
    weights = torch.randn_like(expected)
    own = out[:, :, : len(batch.ids_N)]
    compare([own], [expected])
    compare(torch.autograd.grad((own * weights).sum(), inputs), torch.autograd.grad((expected * weights).sum(), inputs))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, about torch itself
def test_one_kernel_computes_trees_of_any_size(make_call: MakeCall, tmp_path: Path) -> None:
    """Compiled for this CPU, which has a kernel without gradient that skips blocks."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_inductor_cache

    if not torch.cpu._is_avx2_supported():
        pytest.skip("torch compiles FlexAttention for x86 CPUs with AVX2 only")
    counters.clear()
    with fresh_inductor_cache(dir=str(tmp_path)), torch.no_grad(), torch._dynamo.config.patch(recompile_limit=4):
        for number, count in enumerate((130, 300, 511, 700, 1300)):
            rng = np.random.default_rng(number)
            batch = pack([make_call(tokens(rng, count - 60), tokens(rng, 60), sequence=i) for i in range(2)])
            plan = plan_flex(batch, CPU)
            query, key, value = queries(plan.blocks.shape[-1])
            expected = plan.attend(query, key, value, 0.3)
            found = tree_attention.fused()(query, key, value, plan.blocks, 0.3)
            compare([found], [expected])
            reused = counters["stats"]["unique_graphs"]
            assert reused <= 2, f"a kernel of its own for {len(batch.ids_N)} tokens"


def compare(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], limit: float = 1e-5) -> None:
    """Largest difference relative to the tensor's largest value, over all tensors."""
    assert error(found, expected) < limit


def error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).detach().abs().max() / b.detach().abs().max().clamp_min(1e-30)) for a, b in pairs)


# ---- the learner -----------------------------------------------------------------------------------------------------


def learned(
    policy: Policy, batch: PackedBatch, options: LearnerOptions, *, rows: bool = False
) -> tuple[torch.Tensor, ...]:
    """Hidden states, log-probs and all gradients of a pass."""
    learner = TorchLearner(policy, options)
    learner.rows = rows
    with torch.no_grad():
        hidden = learner._score(batch).hidden_EH
    scores, value, _ = learner._loss(batch, LOSS)
    value.backward()
    found = tuple(p.grad.clone() for p in policy.trainable() if p.grad is not None)
    policy.model.zero_grad(set_to_none=True)
    assert learner.rows == rows
    assert learner.options == options
    return hidden, scores.logprobs_E.detach(), *found


@pytest.mark.parametrize("name", TREES)
def test_numbers_are_those_of_segments_and_of_rows(policy: Policy, make_call: MakeCall, name: str) -> None:
    batch = pack(TREES[name](np.random.default_rng(3), make_call))
    expected = learned(policy, batch, SEGMENTS)
    compare(learned(policy, batch, FLEX), expected)
    compare(learned(policy, batch, FLEX), learned(policy, batch, SEGMENTS, rows=True))


@pytest.mark.slow
def test_random_trees_of_all_sizes(policy: Policy, make_call: MakeCall) -> None:
    sizes = set()
    for seed in range(8):
        batch = pack(branching(np.random.default_rng(seed), make_call))
        sizes.add(len(batch.ids_N) % BLOCK)
        compare(learned(policy, batch, FLEX), learned(policy, batch, SEGMENTS))
    assert len(sizes) > 4


def test_an_adapter_with_gradient_checkpointing(tiny_model_dir: Path, make_call: MakeCall) -> None:
    """What is computed a second time is computed as a tree, too."""
    compare(*by_checkpoints(tiny_model_dir, make_call, "cpu"))


def by_checkpoints(model: Path, make_call: MakeCall, device: str) -> tuple[Numbers, Numbers]:
    """An adapter's numbers with gradient checkpointing, and those of segments without."""
    torch.manual_seed(0)
    policy = load_policy(model, device=device, lora=LoraSpec(rank=4))
    for parameter in policy.trainable():
        parameter.data.add_(torch.randn_like(parameter) * 0.02)
    batch = pack(branching(np.random.default_rng(1), make_call))
    again = LearnerOptions(tree_attention="flex", gradient_checkpointing=True, logits_at_once=4000)
    return learned(policy, batch, again), learned(policy, batch, SEGMENTS)


def test_bfloat16_within_its_rounding(tiny_model_dir: Path, make_call: MakeCall) -> None:
    """Both are as far from float32, as the same sums in another order are."""
    batch = pack(branching(np.random.default_rng(1), make_call))
    exact = learned(load_policy(tiny_model_dir, device="cpu"), batch, SEGMENTS)
    short = load_policy(tiny_model_dir, device="cpu", dtype="bfloat16")
    ours, theirs = (error(learned(short, batch, options), exact) for options in (FLEX, SEGMENTS))
    assert theirs < 0.2
    assert ours < 1.5 * theirs


def test_a_mask_that_lets_siblings_through_is_noticed(
    policy: Policy, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain causal attention over the packed row, in the comparison, in the check of packing, and in the trial."""
    batch = pack(wide(np.random.default_rng(0), make_call))
    expected = learned(policy, batch, SEGMENTS)
    learner = TorchLearner(policy, FLEX)
    learner.forward(batch)  # its trial of the model finds nothing yet
    monkeypatch.setattr(tree_attention, "subtree_ends", lambda batch: np.full_like(batch.ids_N, len(batch.ids_N)))
    with torch.no_grad():
        assert error([learner._score(batch).logprobs_E], expected[1:2]) > 1e-2
    assert not learner.check_packing(batch, LOSS).holds
    assert learner.rows
    tried = TorchLearner(policy, FLEX)
    np.testing.assert_allclose(tried.forward(batch), expected[1].numpy(), atol=1e-5)
    assert (tried.options.tree_attention, tried.rows) == ("segments", False)


def test_where_it_does_not_work_segments_are_taken_and_a_warning_says_why(
    policy: Policy, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no compiler was found")

    monkeypatch.setattr(forward, "plan_flex", broken)
    batch = pack(wide(np.random.default_rng(0), make_call))
    learner = TorchLearner(policy, FLEX)
    learner.forward_backward(batch, LOSS)
    assert not learner.rows
    assert "without FlexAttention: no compiler was found" in caplog.text
    caplog.clear()
    learner.forward_backward(batch, LOSS)
    assert not caplog.text


def test_it_is_for_gpus_unless_asked_for() -> None:
    gpu = torch.device("cuda", 1)
    assert forward.takes_flex(LearnerOptions(), gpu)
    assert forward.takes_flex(FLEX, CPU)
    assert not forward.takes_flex(LearnerOptions(), CPU)
    assert not forward.takes_flex(SEGMENTS, gpu)
