"""Models that mix attention with gated delta nets: trees give the hidden states, log-probs and gradients of rows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from agentlightning.learner import tree_recurrence
from agentlightning.learner.base import LearnerOptions, PackedBatch
from agentlightning.learner.forward import why_no_tree
from agentlightning.learner.packing import CreditedCall, pack
from agentlightning.learner.policy import LoraSpec, Policy, load_policy
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.learner.tree_recurrence import plan_recurrence, recurrent_layers
from agentlightning.learner.trial import worst_error

from .conftest import MakeCall
from .test_flex_tree import FLEX, LOSS, SEGMENTS, TREES, compare, error, tokens

L, F = "linear_attention", "full_attention"
SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "max_position_embeddings": 1024, "pad_token_id": 0, "initializer_range": 0.1,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
Numbers = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]
NAMES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")


def hybrid(name: str, kinds: tuple[str, ...] = (L, F, L)) -> PreTrainedModel:
    """A small random model that remembers far back; Qwen3-Next and Qwen3.5-MoE with experts."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = SHAPE if name == "qwen3_5_text" else {**SHAPE, **EXPERTS}
    if name == "olmo_hybrid":
        shape = {k: v for k, v in SHAPE.items() if k != "head_dim"}
    config = AutoConfig.for_model(name, **shape, num_hidden_layers=len(kinds), layer_types=list(kinds))
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():  # nothing may be 0 or 1 just because training has not begun
        parameter.data.add_(0.05 * torch.randn_like(parameter))
        if name.endswith("A_log"):
            parameter.data.uniform_(-5.0, -1.0)
    return model


def policy_of(model: PreTrainedModel) -> Policy:
    return Policy("", model, cast(Any, None), (2,))


def numbers(policy: Policy, batch: PackedBatch, options: LearnerOptions, *, rows: bool = False) -> Numbers:
    """Hidden states and log-probs, and all gradients, without a trial before."""
    learner = TorchLearner(policy, options)
    learner.rows, learner._tried = rows, True
    with torch.no_grad():
        hidden_EH = learner._score(batch).hidden_EH
    scores, value, _ = learner._loss(batch, LOSS)
    gradients = torch.autograd.grad(value, policy.trainable())
    assert learner.rows == rows
    return (hidden_EH, scores.logprobs_E.detach()), gradients


def agree(found: Numbers, expected: Numbers) -> None:
    """Hidden states and log-probs to 1e-5 of the largest value; each gradient to 5e-5 of its own largest value, at
    least of a thousandth of the largest of all: float32 rounds small ones otherwise with other numbers of threads.
    """
    compare(found[0], expected[0])
    assert worst_error(found[1], expected[1]) < 5e-5


# ---- trees -----------------------------------------------------------------------------------------------------------


def short(rng: np.random.Generator, make_call: MakeCall) -> list[CreditedCall]:
    """Segments of one token below each other: the convolution sees several of them at the same time."""
    path, calls = tokens(rng, 3), []
    for turn in range(8):
        calls.append(make_call(path, tokens(rng, 1 + turn % 3), sequence=turn, advantage=1.0 - 0.3 * turn))
        path = np.concatenate([path, tokens(rng, 1)])
    return calls


def chunks(rng: np.random.Generator, make_call: MakeCall) -> list[CreditedCall]:
    """Segments that end just before, at and just after a chunk of 64, with others below them."""
    calls = []
    for number, length in enumerate((63, 64, 65, 127, 128, 129)):
        path = np.append(np.int32(7), tokens(rng, length - 1))
        calls += [
            make_call(path, np.append(np.int32(i), tokens(rng, 60 + 4 * i)), sequence=3 * number + i, advantage=i - 0.7)
            for i in range(3)
        ]
    return calls


ALL = {**TREES, "short": short, "chunks": chunks}


@pytest.mark.quick_with("branching", "chunks")
@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
@pytest.mark.parametrize("tree", ALL)
def test_numbers_are_those_of_rows(name: str, tree: str, make_call: MakeCall) -> None:
    batch = pack(ALL[tree](np.random.default_rng(3), make_call))
    policy = policy_of(hybrid(name))
    expected = numbers(policy, batch, SEGMENTS, rows=True)
    agree(numbers(policy, batch, SEGMENTS), expected)
    agree(numbers(policy, batch, FLEX), expected)


@pytest.mark.quick_with("qwen3_next")
@pytest.mark.parametrize("name", NAMES)
def test_random_trees(name: str, make_call: MakeCall) -> None:
    policy = policy_of(hybrid(name))
    for seed in range(2):
        batch = pack(TREES["branching"](np.random.default_rng(seed), make_call))
        agree(numbers(policy, batch, SEGMENTS), numbers(policy, batch, SEGMENTS, rows=True))


@pytest.mark.quick_with("branching-qwen3_next", "branching-olmo_hybrid")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tree", ["branching", pytest.param("chunks", marks=pytest.mark.slow)])
def test_in_float64_they_are_the_same_numbers(
    name: str, tree: str, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what differs in float32 is how its sums are rounded, and nothing else."""
    policy = policy_of(hybrid(name).double())
    policy.model.set_experts_implementation("eager")  # the kernel knows no float64
    everything_in_float64(policy.model, monkeypatch)
    batch = pack(ALL[tree](np.random.default_rng(5), make_call))
    found, expected = (numbers(policy, batch, SEGMENTS, rows=rows) for rows in (False, True))
    assert {t.dtype for t in (*found[0], *found[1])} == {torch.float64}
    for got, exact in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(got, exact, rtol=0.0, atol=1e-10 * float(exact.abs().max()))


def everything_in_float64(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's layers compute norms, angles and the delta rule in float32, whatever the weights are."""

    class Torch:
        float32 = float = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(sys.modules[type(model).__module__], "torch", Torch())


def test_a_model_without_any_attention(make_call: MakeCall) -> None:
    """What the layers know of other segments they know by their states alone."""
    policy = policy_of(hybrid("qwen3_5_text", (L, L)))
    batch = pack(TREES["branching"](np.random.default_rng(0), make_call))
    agree(numbers(policy, batch, SEGMENTS), numbers(policy, batch, SEGMENTS, rows=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # of peft, about its own pattern
@pytest.mark.parametrize("options", [SEGMENTS, FLEX])
def test_an_adapter_with_gradient_checkpointing(options: LearnerOptions, tmp_path: Path, make_call: MakeCall) -> None:
    import msgspec

    from agentlightning.models import resolve_model

    hybrid("qwen3_next").save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(resolve_model("calc")).save_pretrained(tmp_path)
    policy = load_policy(tmp_path, device="cpu", lora=LoraSpec(rank=4))
    for parameter in policy.trainable():
        parameter.data.add_(torch.randn_like(parameter) * 0.02)
    batch = pack(TREES["branching"](np.random.default_rng(1), make_call))
    again = msgspec.structs.replace(options, gradient_checkpointing=True, logits_at_once=4000)
    expected = numbers(policy, batch, SEGMENTS, rows=True)
    trained = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    assert any("in_proj_ba.lora_A" in name for name in trained)
    agree(numbers(policy, batch, again), expected)
    agree(numbers(policy, batch, options), expected)


def test_bfloat16_within_its_rounding(make_call: MakeCall) -> None:
    batch = pack(TREES["branching"](np.random.default_rng(1), make_call))
    exact = numbers(policy_of(hybrid("qwen3_5_text")), batch, SEGMENTS)
    half = policy_of(hybrid("qwen3_5_text").bfloat16())
    trees, rows = (error(numbers(half, batch, SEGMENTS, rows=rows)[0], exact[0]) for rows in (False, True))
    assert trees < 1.5 * rows


# ---- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", ALL)
def test_every_token_is_computed_once_after_its_parent(tree: str, make_call: MakeCall) -> None:
    batch = pack(ALL[tree](np.random.default_rng(5), make_call))
    plan = plan_recurrence(batch, torch.device("cpu"))
    done: set[int] = set()
    for group in plan.groups:
        assert done.issuperset(group.parents)
        assert not done.intersection(group.segments)
        assert len(group.parents) in (0, len(group.segments))
        assert (max(group.lengths) <= 1.3 * min(group.lengths) + 4) or len(group.lengths) == 1
        done.update(group.segments)
    assert done == set(range(len(batch.starts_S)))
    nodes = torch.cat([group.nodes_CL.flatten() for group in plan.groups])
    assert (nodes[plan.places_N] == torch.arange(len(batch.ids_N))).all()


def test_wide_trees_take_few_calls(make_call: MakeCall) -> None:
    """Of forty responses of 1 to 20 tokens, those of like length together."""
    batch = pack(TREES["wide"](np.random.default_rng(0), make_call))
    assert len(batch.starts_S) >= 40
    assert len(plan_recurrence(batch, torch.device("cpu")).groups) <= 6


# ---- what guards it --------------------------------------------------------------------------------------------------

Sabotage = Callable[[pytest.MonkeyPatch], None]


def _no_inputs(patch: pytest.MonkeyPatch) -> None:
    """The convolution begins anew in every segment."""
    own = tree_recurrence._Branches.update_conv_state

    def update(self: Any, inputs: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        self.inputs_S = {s: torch.zeros_like(v) for s, v in self.inputs_S.items()}
        return own(self, inputs, *given, **more)

    patch.setattr(tree_recurrence._Branches, "update_conv_state", update)


def _no_states(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tree_recurrence._Branches, "get_recurrent_state", lambda *_, **__: None)


def _siblings(patch: pytest.MonkeyPatch) -> None:
    """Each segment goes on from where the one before it in the packed row ended."""
    own = tree_recurrence._Branches.get_recurrent_state

    def state(self: Any, *given: Any, **more: Any) -> torch.Tensor | None:
        found = own(self, *given, **more)
        return None if found is None else found.roll(1, 0) + self.states_S[max(self.states_S)]

    patch.setattr(tree_recurrence._Branches, "get_recurrent_state", state)


def _detached(patch: pytest.MonkeyPatch) -> None:
    """No gradient comes back from the states: log-probs are right."""
    own = tree_recurrence._Branches.update_recurrent_state
    patch.setattr(
        tree_recurrence._Branches, "update_recurrent_state", lambda self, s, *given, **more: own(self, s.detach())
    )


def _padding(patch: pytest.MonkeyPatch) -> None:
    """The state that is handed on has read the padding."""
    patch.setattr(tree_recurrence, "GATES", dict.fromkeys(tree_recurrence.GATES, ()))


@pytest.mark.quick_with("siblings")
@pytest.mark.parametrize("sabotage", [_no_inputs, _no_states, _siblings, _detached, _padding])
@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
def test_a_wrong_state_is_noticed(
    name: str, sabotage: Sabotage, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the check of packing, and by the trial, which then computes rows."""
    batch = pack(TREES["branching"](np.random.default_rng(0), make_call))
    learner = TorchLearner(policy_of(hybrid(name)), SEGMENTS)
    expected = learner.forward(batch)  # its trial of the model finds nothing yet
    assert not learner.rows
    assert learner.check_packing(batch, LOSS).holds
    sabotage(monkeypatch)
    assert not learner.check_packing(batch, LOSS).holds
    assert learner.rows
    tried = TorchLearner(learner.policy, SEGMENTS)
    np.testing.assert_allclose(tried.forward(batch), expected, atol=1e-5)
    assert tried.rows
    assert "differ" in tried.why_rows


def test_layers_of_other_classes_are_computed_as_rows() -> None:
    """As long as one of them is not known."""
    model = hybrid("qwen3_5_text")
    assert why_no_tree(model, 10) is None
    assert len(recurrent_layers(model)) == 2
    odd = recurrent_layers(model)[1]
    odd.__class__ = type("Odd", (type(odd),), {})
    assert "linear_attention read tokens one after the other" in (why_no_tree(model, 10) or "")


def test_the_model_is_as_it_was_afterwards(make_call: MakeCall) -> None:
    model = hybrid("qwen3_next")
    batch = pack(TREES["wide"](np.random.default_rng(0), make_call))
    ids = torch.arange(3, 90)[None]
    before = model(input_ids=ids, use_cache=False).logits
    numbers(policy_of(model), batch, LearnerOptions(gradient_checkpointing=True))
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
    assert not any(
        "forward" in vars(layer) or any(m._forward_hooks for m in layer.modules()) for layer in model.modules()
    )
