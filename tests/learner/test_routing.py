"""Routing replay: later passes take the experts of the first one, weighed by the router as it is now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentlightning.errors import ConfigError
from agentlightning.learner.base import LearnerOptions, LossConfig, OptimParams
from agentlightning.learner.packing import CreditedCall, pack
from agentlightning.learner.policy import Policy, load_policy
from agentlightning.learner.torch_learner import TorchLearner

LOSS, FAR = LossConfig(name="reinforce"), OptimParams(learning_rate=0.05)


@pytest.fixture
def experts(tmp_path: Path) -> Policy:
    """A random Qwen3-MoE: two layers with eight experts, two for each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "head_dim": 8}
    chosen: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    chosen |= {"num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = Qwen3MoeConfig(vocab_size=256, initializer_range=0.3, bos_token_id=None, **sizes, **chosen, **heads)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    return load_policy(tmp_path, device="cpu")


class Watched:
    """What goes into the expert layers, what comes out, and the experts that were taken; by layer, of the last pass."""

    def __init__(self, policy: Policy) -> None:
        self.blocks: list[Any] = [m for m in policy.model.modules() if type(m).__name__ == "Qwen3MoeSparseMoeBlock"]
        self.given: list[Any] = [None] * len(self.blocks)
        self.made: list[Any] = [None] * len(self.blocks)
        self.taken: list[Any] = [None] * len(self.blocks)
        for n, block in enumerate(self.blocks):
            block.register_forward_hook(lambda _, given, made, n=n: self._keep(n, given, made))
            block.gate.register_forward_hook(lambda _, given, made, n=n: self.taken.__setitem__(n, made[2].clone()))

    def _keep(self, n: int, given: Any, made: Any) -> None:
        self.given[n], self.made[n] = given[0].detach().clone(), made.detach().clone()


def by_hand(block: Any, hidden: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """Σ_k w_k E_k(h): the router's probabilities of the taken experts, made to sum to 1, times a gated MLP each."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    probabilities = (flat @ block.gate.weight.T).softmax(-1)
    out = torch.zeros_like(flat)
    for token, chosen in enumerate(taken.tolist()):
        weights = probabilities[token, chosen] / probabilities[token, chosen].sum()
        for weight, expert in zip(weights, chosen, strict=True):
            gate, up = (block.experts.gate_up_proj[expert] @ flat[token]).chunk(2)
            out[token] += weight * (block.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
    return out.reshape(hidden.shape)


def test_the_experts_of_the_first_pass_are_taken_with_the_routers_weights_of_now(
    experts: Policy, group_of_conversations: list[CreditedCall]
) -> None:
    learner, batch = TorchLearner(experts), pack(group_of_conversations)
    watched = Watched(experts)
    learner.keep_routes(batch, first=True)
    before = [taken.clone() for taken in watched.taken]
    learner.forward_backward(batch, LOSS)
    learner.optim_step(FAR)
    learner.forward(batch)
    free = [taken.clone() for taken in watched.taken]
    assert any((a.sort(-1).values != b.sort(-1).values).any() for a, b in zip(before, free, strict=True))
    passed = learner.forward_backward(batch, LOSS)
    assert passed.metrics["rerouted"] > 0
    assert all(torch.equal(a, b) for a, b in zip(before, watched.taken, strict=True))
    with torch.no_grad():
        for block, given, made, taken in zip(watched.blocks, watched.given, watched.made, before, strict=True):
            torch.testing.assert_close(made, by_hand(block, given, taken), rtol=1e-4, atol=1e-5)
    assert all(block.gate.weight.grad.abs().max() > 0 for block in watched.blocks), "the router learns"
    assert np.abs(passed.logprobs - learner.forward(batch)).max() > 1e-3, "the policy itself chooses freely"


def test_before_an_update_replay_changes_nothing(experts: Policy, group_of_conversations: list[CreditedCall]) -> None:
    learner, batch = TorchLearner(experts), pack(group_of_conversations)
    plain = learner.forward_backward(batch, LOSS)
    gradients = learner.take_gradient()
    learner.keep_routes(batch, first=True)
    replayed = learner.forward_backward(batch, LOSS)
    assert replayed.metrics["rerouted"] == 0
    np.testing.assert_array_equal(plain.logprobs, replayed.logprobs)
    for one, two in zip(gradients, learner.take_gradient(), strict=True):
        assert (one is None) == (two is None)
        assert one is None or two is None or torch.equal(one, two)


@pytest.mark.parametrize("rows", [False, True])
def test_what_is_computed_a_second_time_for_its_gradient_finds_its_own_experts(
    experts: Policy, group_of_conversations: list[CreditedCall], rows: bool
) -> None:
    batch, found = pack(group_of_conversations), []
    start = {name: value.clone() for name, value in experts.model.state_dict().items()}
    for again in (False, True):
        experts.model.load_state_dict(start)
        learner = TorchLearner(experts, LearnerOptions(gradient_checkpointing=again))
        learner.rows = rows
        learner.keep_routes(batch, first=True)
        learner.forward_backward(batch, LOSS)
        learner.optim_step(FAR)
        learner.forward_backward(batch, LOSS)
        found.append(learner.take_gradient())
    for one, two in zip(*found, strict=True):
        assert one is not None
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_other_passes_choose_freely_and_the_next_step_forgets(
    experts: Policy, group_of_conversations: list[CreditedCall]
) -> None:
    learner = TorchLearner(experts)
    one, two = pack(group_of_conversations[:9]), pack(group_of_conversations[9:])
    learner.keep_routes(one, first=True)
    learner.keep_routes(two, first=False)
    learner.forward_backward(one, LOSS)
    learner.optim_step(FAR)
    assert learner.forward_backward(two, LOSS).metrics["rerouted"] > 0
    learner.keep_routes(one, first=True)
    assert learner.forward_backward(two, LOSS).metrics["rerouted"] == 0, "not kept any more"


def test_a_model_without_experts_is_refused(policy: Policy, group_of_conversations: list[CreditedCall]) -> None:
    with pytest.raises(ConfigError, match="Leave routing_replay out"):
        TorchLearner(policy).keep_routes(pack(group_of_conversations), first=True)
