"""Packed trees give the gradients of separate rows: random trees, every loss, full weights and LoRA, three precisions.

The reference is independent of the packing: each call alone in a plain forward of the Hugging Face model, and the loss
written out once more over those log-probs. Ratios lie away from the clips' edges, and LoRA's B is not zero.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from agentlightning.learner.base import LearnerOptions, LossConfig
from agentlightning.learner.loss import Entries, compute_loss
from agentlightning.learner.packing import CreditedCall, pack
from agentlightning.learner.policy import LoraSpec, Policy, load_policy
from agentlightning.learner.torch_learner import TorchLearner

from .conftest import MakeCall

LOSSES = {
    "reinforce": LossConfig(name="reinforce"),
    "grpo": LossConfig(name="ppo_clip"),
    "dapo": LossConfig(name="ppo_clip", clip_low=0.2, clip_high=0.28),
    "gspo": LossConfig(name="gspo", clip_low=0.03, clip_high=0.04),
    "cispo": LossConfig(name="cispo", clip_low=1.0, clip_high=0.07),
    "kl-k1": LossConfig(name="ppo_clip", kl_coef=0.1, kl_estimator="k1"),
    "kl-k2": LossConfig(name="ppo_clip", kl_coef=0.1, kl_estimator="k2"),
    "kl-k3": LossConfig(name="ppo_clip", kl_coef=0.1, kl_estimator="k3"),
    "entropy": LossConfig(name="ppo_clip", entropy_coef=0.05),
    "dpo": LossConfig(name="dpo", dpo_beta=0.5),
}
NOISE = (-0.3, -0.1, 0.1, 0.3)
"""Gaps between new and old log-probs: ratios on both sides of each clip, none near an edge."""


def random_tree(rng: np.random.Generator, make_call: MakeCall, depth: int = 3) -> list[CreditedCall]:
    """Conversations that branch anywhere: in the prompt, inside a response, between turns; some sampled the same."""
    credited: list[CreditedCall] = []
    histories = [np.asarray(rng.integers(0, 250, int(rng.integers(1, 9))), dtype=np.int32)]
    for number in range(int(rng.integers(4, 3 + 2 * depth))):
        base = histories[int(rng.integers(len(histories)))]
        keep = int(rng.integers(1, len(base) + 1))
        prompt = np.concatenate([base[:keep], rng.integers(0, 250, int(rng.integers(1, 5)))]).astype(np.int32)
        response = rng.integers(0, 250, int(rng.integers(1, 7))).astype(np.int32)
        for sibling in range(
            int(rng.integers(1, 3))
        ):  # a second one samples the same tokens, and is worth other things
            credited.append(
                make_call(
                    prompt,
                    response,
                    sequence=2 * number + sibling,
                    group=number // 2,
                    advantage=float(rng.choice([-1.0, 1.0]) * rng.uniform(0.5, 2)),
                    weight=float(rng.uniform(0.01, 0.1)),
                )
            )
        histories.append(np.concatenate([prompt, response]))
    return credited


def plain_logits(policy: Policy, credited: CreditedCall) -> torch.Tensor:
    call = credited.call
    ids = torch.as_tensor(np.concatenate([call.prompt_ids, call.response_ids]).astype(np.int64))[None]
    logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(call.prompt_ids) - 1 : -1]
    return logits / call.info.temperature


def plain_logprobs(policy: Policy, credited: CreditedCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the response and entropies, from the plain forward on the call's own row."""
    table = plain_logits(policy, credited).log_softmax(-1)
    chosen = torch.as_tensor(credited.call.response_ids.astype(np.int64))[:, None]
    return table.gather(1, chosen)[:, 0], -(table.exp() * table).sum(-1)


def reference_gradients(
    policy: Policy, calls: list[CreditedCall], loss: LossConfig, reference_E: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    found = [plain_logprobs(policy, c) for c in calls]
    lengths = [len(c.call.response_ids) for c in calls]
    repeat = torch.tensor(lengths)
    entries = Entries(
        logprobs_E=torch.cat([lp for lp, _ in found]),
        old_E=torch.tensor(np.concatenate([c.call.plain_logprobs for c in calls])),
        advantages_E=torch.tensor(np.concatenate([c.advantages for c in calls])),
        weights_E=torch.tensor(np.concatenate([c.weights for c in calls])),
        sequence_E=torch.tensor([c.sequence for c in calls]).repeat_interleave(repeat),
        group_E=torch.tensor([c.group for c in calls]).repeat_interleave(repeat),
        entropy_E=torch.cat([e for _, e in found]),
        reference_E=reference_E,
    )
    value, _ = compute_loss(entries, loss)
    value.backward()
    return gradients(policy)


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad(set_to_none=True)
    return found


def worst_error(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference relative to the tensor's largest value, over all tensors."""
    assert got.keys() == expected.keys()
    return max(float((got[n] - e).abs().max() / e.abs().max().clamp_min(1e-300)) for n, e in expected.items())


@pytest.fixture
def everything_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face computes norms and rotary angles in float32 whatever the weights are; here they are float64 too."""

    def norm(self: modeling_qwen3.Qwen3RMSNorm, hidden: torch.Tensor) -> torch.Tensor:
        variance = hidden.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden * torch.rsqrt(variance + self.variance_epsilon)

    def rotary(self: modeling_qwen3.Qwen3RotaryEmbedding, x: torch.Tensor, position_ids: torch.Tensor):
        angles = position_ids[0, :, None].double() * self.inv_freq.double()[None]
        table = torch.cat([angles, angles], dim=-1)[None]
        return table.cos(), table.sin()

    monkeypatch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_qwen3.Qwen3RotaryEmbedding, "forward", rotary)


def check(tiny_model_dir: Path, make_call: MakeCall, loss: LossConfig, *, lora: bool, dtype: str, seed: int) -> float:
    """The worst relative error over all tensors for one random tree."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    policy = load_policy(tiny_model_dir, device="cpu", dtype=dtype, lora=LoraSpec(rank=4) if lora else None)
    learner = TorchLearner(policy, LearnerOptions(reference=str(tiny_model_dir)))
    for parameter in policy.trainable():  # away from the reference, and LoRA's B away from zero
        parameter.data.add_(torch.randn_like(parameter) * 0.02)
    calls = random_tree(rng, make_call)
    with torch.no_grad():
        for i, c in enumerate(calls):
            now = plain_logprobs(policy, c)[0].numpy()
            old = (now + rng.choice(NOISE, len(now))).astype(np.float32)
            calls[i] = replace(c, call=replace(c.call, plain_logprobs=old))
        calls[-1] = replace(
            calls[-1], call=replace(calls[-1].call, info=replace(calls[-1].call.info, temperature=0.75))
        )
    reference_E = None
    if loss.needs_reference:
        base = load_policy(tiny_model_dir, device="cpu", dtype=dtype)
        with torch.no_grad():
            reference_E = torch.cat([plain_logprobs(base, c)[0] for c in calls])
    learner.forward_backward(pack(calls), loss)
    return worst_error(gradients(policy), reference_gradients(policy, calls, loss, reference_E))


@pytest.mark.quick_with("grpo-full", "gspo-lora", "kl-k3-full", "entropy-full", "dpo-lora")
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", LOSSES)
def test_fp32_gradients_agree_to_1e_5(tiny_model_dir: Path, make_call: MakeCall, name: str, lora: bool) -> None:
    for seed in range(3):
        assert check(tiny_model_dir, make_call, LOSSES[name], lora=lora, dtype="float32", seed=seed) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", LOSSES)
def test_fp64_gradients_agree_to_1e_6(tiny_model_dir: Path, make_call: MakeCall, name: str, lora: bool) -> None:
    assert check(tiny_model_dir, make_call, LOSSES[name], lora=lora, dtype="float64", seed=7) < 1e-6


@pytest.mark.quick_with("dapo-full", "cispo-lora", "kl-k2-lora", "dpo-full")
@pytest.mark.usefixtures("everything_in_fp64")
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", LOSSES)
def test_fp64_throughout_agrees_to_1e_10(tiny_model_dir: Path, make_call: MakeCall, name: str, lora: bool) -> None:
    assert check(tiny_model_dir, make_call, LOSSES[name], lora=lora, dtype="float64", seed=8) < 1e-10


def test_the_comparison_is_not_blind(tiny_model_dir: Path, make_call: MakeCall) -> None:
    """Negative control: one advantage that differs shows."""
    policy = load_policy(tiny_model_dir, device="cpu")
    calls = random_tree(np.random.default_rng(0), make_call)
    TorchLearner(policy).forward_backward(pack(calls), LOSSES["reinforce"])
    changed = [replace(calls[0], advantages=-calls[0].advantages), *calls[1:]]
    assert worst_error(gradients(policy), reference_gradients(policy, changed, LOSSES["reinforce"], None)) > 1e-2


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_saving_memory_changes_no_gradient(tiny_model_dir: Path, make_call: MakeCall, lora: bool) -> None:
    """Gradient checkpointing, logits piece by piece, and rows instead of the tree."""
    torch.manual_seed(0)
    policy = load_policy(tiny_model_dir, device="cpu", lora=LoraSpec(rank=4) if lora else None)
    for parameter in policy.trainable():
        parameter.data.add_(torch.randn_like(parameter) * 0.02)
    batch = pack(random_tree(np.random.default_rng(4), make_call))
    loss = LossConfig(name="gspo", entropy_coef=0.1, clip_low=0.3, clip_high=0.3)
    found = []
    for options, rows in (
        (LearnerOptions(), False),
        (LearnerOptions(gradient_checkpointing=True, logits_at_once=2000), False),
        (LearnerOptions(gradient_checkpointing=True), True),
    ):
        learner = TorchLearner(policy, options)
        learner.rows = rows
        learner.forward_backward(batch, loss)
        found.append(gradients(policy))
    assert worst_error(found[1], found[0]) < 1e-5
    assert worst_error(found[2], found[0]) < 1e-5


def test_many_rows_keep_the_activations_of_one_pass_at_most(
    policy: Policy, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows are more tokens than one pass takes, each pass is computed again when its gradient is due."""
    from agentlightning.learner import forward

    batch = pack(random_tree(np.random.default_rng(4), make_call))
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[-1] += tensor.untyped_storage().nbytes()
        return tensor

    found = []
    for tokens in (forward.ROW_TOKENS, 16):
        monkeypatch.setattr(forward, "ROW_TOKENS", tokens)
        learner = TorchLearner(policy)
        learner.rows = True
        learner.forward(batch)  # with its trial of the model behind it
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            _, value, _ = learner._loss(batch, LOSSES["gspo"])
        value.backward()
        found.append(gradients(policy))
    assert kept[1] < kept[0] / 4
    assert worst_error(found[1], found[0]) < 1e-5
    learner = TorchLearner(policy, LearnerOptions(gradient_checkpointing=True))  # in what is computed again, again
    learner.rows = True
    learner.forward_backward(batch, LOSSES["gspo"])
    assert worst_error(gradients(policy), found[0]) < 1e-5


def test_a_check_holds_and_leaves_gradients_alone(policy: Policy, make_call: MakeCall) -> None:
    learner = TorchLearner(policy)
    batch = pack(random_tree(np.random.default_rng(5), make_call))
    learner.forward_backward(batch, LOSSES["reinforce"])
    before = {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}
    check = learner.check_packing(batch, LOSSES["reinforce"])
    assert check.holds
    assert check.logprobs < 1e-5
    assert check.gradients < 1e-5
    assert not learner.rows
    assert worst_error(gradients(policy), before) == 0.0


def test_a_check_that_does_not_hold_turns_to_rows(
    policy: Policy, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that ignores the tree: its packed pass sees tokens of other branches."""
    import msgspec

    from agentlightning.learner import forward

    learner = TorchLearner(policy)
    calls = random_tree(np.random.default_rng(6), make_call)
    learner.forward(pack(calls))  # its trial of the model finds nothing yet
    honest = forward.plan_tree

    def wrong(batch, device):  # every segment hangs below the one before it
        chain = np.arange(-1, len(batch.parents_S) - 1, dtype=np.int32)
        return honest(msgspec.structs.replace(batch, parents_S=chain), device)

    monkeypatch.setattr(forward, "plan_tree", wrong)
    assert not learner.check_packing(pack(calls), LOSSES["reinforce"]).holds
    assert learner.rows
    learner.forward_backward(pack(calls), LOSSES["reinforce"])
    assert worst_error(gradients(policy), reference_gradients(policy, calls, LOSSES["reinforce"], None)) < 1e-5


def test_gradients_that_are_only_rounding_break_no_check(make_call: MakeCall) -> None:
    """Without rotary positions softmax cancels the bias of the keys out: its gradient is noise, in trees as in rows."""
    shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
    torch.manual_seed(0)
    config = OPTConfig(vocab_size=300, max_position_embeddings=64, word_embed_proj_dim=32, **shape)
    model: Any = OPTForCausalLM(config).eval()
    calls = random_tree(np.random.default_rng(5), make_call)
    check = TorchLearner(Policy("", model, None, (0,))).check_packing(pack(calls), LOSSES["reinforce"])  # pyright: ignore[reportArgumentType]
    assert check.holds
    assert check.gradients < 1e-4


def test_models_that_cannot_do_trees_are_told_apart(policy: Policy) -> None:
    from agentlightning.learner.forward import why_no_tree

    config = policy.model.config
    assert why_no_tree(policy.model, 100_000) is None
    config.layer_types = ["full_attention", "sliding_attention"]
    config.sliding_window = 64
    assert why_no_tree(policy.model, 64) is None
    assert "sliding window is 64" in (why_no_tree(policy.model, 65) or "")
    config.layer_types = ["full_attention", "linear_attention"]
    assert "linear_attention" in (why_no_tree(policy.model, 10) or "")
