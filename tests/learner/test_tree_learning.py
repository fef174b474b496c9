"""The packed tree gives the very numbers that each call alone would give."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from agentlightning.learner.base import LossConfig, OptimParams
from agentlightning.learner.packing import CreditedCall, pack, split_by_budget
from agentlightning.learner.policy import LoraSpec, Policy, load_policy
from agentlightning.learner.torch_learner import TorchLearner

LOSSES = [
    LossConfig(name="reinforce"),
    LossConfig(name="ppo_clip", clip_low=0.2, clip_high=0.28),
    LossConfig(name="ppo_clip", entropy_coef=0.05),
]


def alone(policy: Policy, credited: CreditedCall) -> torch.Tensor:
    """Log-probs of a call's response from the plain forward on its own row."""
    call = credited.call
    ids = torch.as_tensor(np.concatenate([call.prompt_ids, call.response_ids]).astype(np.int64))[None]
    logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(call.prompt_ids) - 1 : -1]
    chosen = torch.as_tensor(call.response_ids.astype(np.int64))[:, None]
    return (logits / call.info.temperature).log_softmax(-1).gather(1, chosen)[:, 0]


def with_old_logprobs(policy: Policy, calls: list[CreditedCall], noise: float) -> list[CreditedCall]:
    """As if sampled by slightly other weights, so that ratios are not 1 and lie away from the clip's edges."""
    rng = np.random.default_rng(1)
    out = []
    for c in calls:
        with torch.no_grad():
            old = alone(policy, c).numpy() + rng.choice([-noise, noise], len(c.call.response_ids)).astype(np.float32)
        out.append(replace(c, call=replace(c.call, plain_logprobs=old)))
    return out


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad(set_to_none=True)
    return found


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Per tensor, the largest difference is 1e-5 of the largest value."""
    assert got.keys() == expected.keys()
    for name, reference in expected.items():
        scale = reference.abs().max().clamp_min(1e-8)
        assert (got[name] - reference).abs().max() / scale < 1e-5, name


def test_logprobs_equal_each_call_alone(policy: Policy, group_of_conversations: list[CreditedCall]) -> None:
    packed = TorchLearner(policy).forward(pack(group_of_conversations))
    with torch.no_grad():
        expected = torch.cat([alone(policy, c) for c in group_of_conversations]).numpy()
    assert np.abs(packed - expected).max() < 2e-5


def test_wrong_positions_would_be_noticed(policy: Policy, group_of_conversations: list[CreditedCall]) -> None:
    """Negative control: the comparison above is not blind."""
    import msgspec

    batch = pack(group_of_conversations)
    wrong = msgspec.structs.replace(batch, positions_N=np.arange(len(batch.ids_N), dtype=np.int32))
    learner = TorchLearner(policy)
    assert np.abs(learner.forward(batch) - learner.forward(wrong)).max() > 1e-2


@pytest.mark.parametrize("loss", LOSSES, ids=lambda c: f"{c.name}-{c.entropy_coef}")
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_gradients_equal_each_call_alone(
    tiny_model_dir, group_of_conversations: list[CreditedCall], loss: LossConfig, lora: bool
) -> None:
    torch.manual_seed(0)
    policy = load_policy(tiny_model_dir, device="cpu", lora=LoraSpec(rank=4) if lora else None)
    for parameter in policy.trainable() if lora else ():
        parameter.data.add_(torch.randn_like(parameter) * 0.02)  # B starts at zero, which would hide A
    calls = with_old_logprobs(policy, group_of_conversations, noise=0.1)
    learner = TorchLearner(policy)
    learner.forward_backward(pack(calls), loss)
    packed = gradients(policy)
    for c in calls:
        learner.forward_backward(pack([c]), loss)
    rows = gradients(policy)
    assert_close(packed, rows)


def test_micro_batches_add_up_to_the_whole(policy: Policy, group_of_conversations: list[CreditedCall]) -> None:
    learner, loss = TorchLearner(policy), LossConfig(name="reinforce")
    learner.forward_backward(pack(group_of_conversations), loss)
    whole = gradients(policy)
    for budget, count in ((1, 6), (80, 2), (1000, 1)):
        parts = split_by_budget(group_of_conversations, max_tokens=budget)
        assert len(parts) == count
        for part in parts:
            learner.forward_backward(pack(part), loss)
        assert_close(gradients(policy), whole)
    assert len(split_by_budget(group_of_conversations, max_tokens=1, whole_groups=True)) == 2


def test_a_sampled_token_is_trained_once(group_of_conversations: list[CreditedCall]) -> None:
    batch = pack(group_of_conversations)
    assert len(batch.targets_E) == sum(len(c.call.response_ids) for c in group_of_conversations)
    rows = sum(len(c.call.prompt_ids) + len(c.call.response_ids) for c in group_of_conversations)
    assert len(batch.ids_N) < rows / 2
    assert (batch.positions_N[batch.source_E] >= 0).all()


def test_temperature_divides_the_logits(policy: Policy, make_call) -> None:
    call = make_call(np.arange(5, dtype=np.int32), np.array([7, 8], dtype=np.int32), temperature=0.5)
    got = TorchLearner(policy).forward(pack([call]))
    with torch.no_grad():
        assert np.abs(got - alone(policy, call).numpy()).max() < 2e-5


def test_a_step_moves_towards_what_was_better(policy: Policy, make_call) -> None:
    prompt = np.arange(6, dtype=np.int32)
    good = make_call(prompt, np.array([11, 12], dtype=np.int32), sequence=0, advantage=1.0)
    bad = make_call(prompt, np.array([13, 14], dtype=np.int32), sequence=1, advantage=-1.0)
    learner = TorchLearner(policy)
    before = learner.forward(pack([good, bad]))
    learner.forward_backward(pack([good, bad]), LossConfig(name="reinforce"))
    metrics = learner.optim_step(OptimParams(learning_rate=1e-3))
    after = learner.forward(pack([good, bad]))
    assert metrics.version == policy.version == 1
    assert (after - before)[:2].sum() > 0 > (after - before)[2:].sum()


def test_a_gradient_that_is_not_finite_leaves_the_weights(policy: Policy, make_call) -> None:
    from agentlightning.errors import EngineError

    learner = TorchLearner(policy)
    weights = [p.detach().clone() for p in policy.trainable()]
    call = make_call(np.arange(4, dtype=np.int32), np.array([5], dtype=np.int32), advantage=float("nan"))
    learner.forward_backward(pack([call]), LossConfig(name="reinforce"))
    with pytest.raises(EngineError, match="not finite"):
        learner.optim_step(OptimParams(learning_rate=1e-3))
    assert all(torch.equal(a, b) for a, b in zip(weights, policy.trainable(), strict=True))
    assert policy.version == 0


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)], ids=["full", "lora"])
def test_saved_and_loaded_goes_on_identically(tiny_model_dir, tmp_path, make_call, lora) -> None:
    torch.manual_seed(0)
    calls = [make_call(np.arange(6, dtype=np.int32), np.array([9, 10], dtype=np.int32))]
    step = OptimParams(learning_rate=1e-3)

    def train(learner: TorchLearner) -> None:
        learner.forward_backward(pack(calls), LossConfig(name="reinforce"))
        learner.optim_step(step)

    first = TorchLearner(load_policy(tiny_model_dir, device="cpu", lora=lora))
    train(first)
    first.export(tmp_path / "model")
    first.save_state(tmp_path / "optimizer")
    train(first)
    second = TorchLearner(load_policy(tmp_path / "model", device="cpu"))
    second.load_state(tmp_path / "optimizer")
    train(second)
    assert second.policy.version == first.policy.version == 2
    pairs = zip(first.policy.trainable(), second.policy.trainable(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.slow
def test_gradients_are_added_in_one_order_by_several_threads_too(
    policy: Policy, group_of_conversations: list[CreditedCall]
) -> None:
    """Threads that add to the same state as they come end in one of several last bits: equal runs would differ."""
    batch, loss, seen = pack(group_of_conversations), LossConfig(name="reinforce"), list[bool]()
    hook = next(policy.model.parameters()).register_hook(
        lambda _: seen.append(torch.are_deterministic_algorithms_enabled())
    )
    learner, threads = TorchLearner(policy), torch.get_num_threads()
    learner.forward_backward(batch, loss)  # the first pass also tries out whether the model learns trees
    seen.clear()
    gradients(policy)
    found = list[dict[str, torch.Tensor]]()
    try:
        for count in (1, 2, 2, 2, 2, 2, 2):
            torch.set_num_threads(count)
            learner.forward_backward(batch, loss)
            found.append(gradients(policy))
    finally:
        torch.set_num_threads(threads)
        hook.remove()
    assert seen == [True] * 7
    assert not torch.are_deterministic_algorithms_enabled(), "only while gradients are added"
    for again in found[2:]:
        assert all(torch.equal(again[name], found[1][name]) for name in again)
