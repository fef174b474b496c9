"""The guard: an update that would move the policy too far is halved until it does not, and the critic learns in its own
time.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agentlightning.learner.base import LearnerOptions, LossConfig, OptimParams, PackedBatch
from agentlightning.learner.critic import ValueHead
from agentlightning.learner.forward import leaf_rows
from agentlightning.learner.guard import MOST_HALVINGS, PROBE_STATES, PROBE_TOKENS, divergence, probes_of
from agentlightning.learner.packing import CreditedCall, pack
from agentlightning.learner.policy import load_policy
from agentlightning.learner.torch_learner import TorchLearner

LOSS = LossConfig(name="reinforce")


def step(
    tiny_model_dir: Path, calls: list[CreditedCall], rate: float, max_kl: float | None, dtype: str = "float32"
) -> tuple[dict[str, float], list[torch.Tensor]]:
    learner = TorchLearner(load_policy(tiny_model_dir, device="cpu", dtype=dtype))
    before = [p.detach().clone() for p in learner.policy.trainable()]
    learner.forward_backward(pack(calls), LOSS)
    metrics = learner.optim_step(OptimParams(learning_rate=rate, max_kl=max_kl)).metrics
    return metrics, [p.detach() - b for p, b in zip(learner.policy.trainable(), before, strict=True)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_jump_is_halved_until_it_is_none(
    tiny_model_dir: Path, group_of_conversations: list[CreditedCall], dtype: str
) -> None:
    _, whole = step(tiny_model_dir, group_of_conversations, 0.05, None, dtype)
    far, _ = step(tiny_model_dir, group_of_conversations, 0.05, 1e9, dtype)
    assert far["kl_step"] > 0.1
    metrics, moved = step(tiny_model_dir, group_of_conversations, 0.05, 0.02, dtype)
    assert 0 < metrics["halvings"] < MOST_HALVINGS
    assert metrics["kl_step"] <= 0.02
    if dtype == "float32":
        for part, all_of_it in zip(moved, whole, strict=True):
            assert torch.allclose(part * 2 ** metrics["halvings"], all_of_it, rtol=1e-3, atol=1e-5), (
                "the same direction"
            )


def test_a_step_within_bounds_is_the_step(tiny_model_dir: Path, group_of_conversations: list[CreditedCall]) -> None:
    _, plain = step(tiny_model_dir, group_of_conversations, 1e-4, None)
    metrics, guarded = step(tiny_model_dir, group_of_conversations, 1e-4, 0.1)
    assert metrics["halvings"] == 0
    assert 0 < metrics["kl_step"] < 0.1
    assert all(torch.equal(a, b) for a, b in zip(plain, guarded, strict=True))


def test_an_end_that_nobody_sampled_is_seen() -> None:
    """13 of 96 responses end at once: the sampled tokens hardly lost any probability, the distribution moved far."""
    old = torch.tensor([[0.9999, 0.0001]]).log()
    new = torch.tensor([[0.865, 0.135]]).log()
    assert divergence(new, old) > 0.8
    assert float(old[0, 0] - new[0, 0]) < 0.15


def rows_of(batch: PackedBatch) -> set[tuple[int, ...]]:
    return {tuple(batch.ids_N[nodes].tolist()) for nodes, _ in leaf_rows(batch)}


def widened(batch: PackedBatch, times: int) -> PackedBatch:
    """The batch so many times, as trees of their own."""
    nodes, segments = len(batch.ids_N), len(batch.starts_S)
    given = {name: value for name in batch.__struct_fields__ if (value := getattr(batch, name)) is not None}
    many = {name: np.concatenate([value] * times) for name, value in given.items()}
    shift = np.arange(times, dtype=np.int32)
    many["starts_S"] += np.repeat(shift * nodes, segments)
    many["parents_S"] = np.where(many["parents_S"] < 0, -1, many["parents_S"] + np.repeat(shift * segments, segments))
    many["source_E"] += np.repeat(shift * nodes, len(batch.source_E))
    return PackedBatch(**many)


def test_the_probe_is_whole_conversations(group_of_conversations: list[CreditedCall]) -> None:
    batch = widened(pack(group_of_conversations), 40)
    (probe,) = probes_of([batch])
    tokens = sum(len(nodes) for nodes, _ in leaf_rows(probe))
    assert PROBE_TOKENS / 2 < tokens <= PROBE_TOKENS
    assert rows_of(probe) <= rows_of(batch)
    assert 0 < len(probe.targets_E) <= PROBE_STATES


def packings(calls: list[CreditedCall]) -> dict[str, list[list[CreditedCall]]]:
    """The calls of an update in passes, whole rollouts in each."""
    rollouts = sorted({c.sequence for c in calls})
    each = [[c for c in calls if c.sequence == rollout] for rollout in rollouts]
    half = len(each) // 2
    return {
        "one": [calls],
        "two": [[c for one in each[:half] for c in one], [c for one in each[half:] for c in one]],
        "another order": [[c for one in reversed(each) for c in one]],
        "each": each[::-1],
    }


def test_a_step_measures_the_same_however_it_is_packed(
    tiny_model_dir: Path, group_of_conversations: list[CreditedCall]
) -> None:
    calls = group_of_conversations
    assert len({c.sequence for c in calls}) > 1
    found: dict[str, float] = {}
    for name, parts in packings(calls).items():
        learner = TorchLearner(load_policy(tiny_model_dir, device="cpu"))
        for part in parts:
            learner.forward_backward(pack(part), LOSS)
        found[name] = learner.optim_step(OptimParams(learning_rate=1e-4, max_kl=1e9)).metrics["kl_step"]
    assert found["one"] > 0
    for name, kl in found.items():
        assert kl == pytest.approx(found["one"], rel=1e-3), (name, found)


def test_the_probe_scores_as_the_batch_does(tiny_model_dir: Path, group_of_conversations: list[CreditedCall]) -> None:
    learner = TorchLearner(load_policy(tiny_model_dir, device="cpu"))
    batch = widened(pack(group_of_conversations), 40)
    (probe,), whole = probes_of([batch]), learner.forward(batch)
    known = {(int(t), round(float(x), 3)) for t, x in zip(batch.targets_E, whole, strict=True)}
    found = {(int(t), round(float(x), 3)) for t, x in zip(probe.targets_E, learner.forward(probe), strict=True)}
    assert len(found - known) <= len(found) // 10, "but for rounding"


# ---- the critic ----------------------------------------------------------------------------------------------------


def test_a_critic_learns_a_return_that_its_states_tell() -> None:
    """From one step's states to the next: what is left of the error on states it has not seen."""
    torch.manual_seed(0)
    critic, direction = ValueHead(16, torch.device("cpu")), torch.randn(16)

    def some(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.randn(n, 16)
        return hidden, (hidden @ direction > 0).float()

    for _ in range(10):
        critic.keep(*some(200))
        critic.step()
    hidden, returns = some(500)
    left = (critic.values(hidden).detach() - returns).var() / returns.var()
    assert float(left) < 0.5


def test_states_that_are_never_asked_for_are_not_learned() -> None:
    critic = ValueHead(4, torch.device("cpu"))
    critic.keep(torch.ones(3, 4), torch.tensor([float("nan"), 1.0, float("nan")]))
    assert critic.step() == {"critic_loss": 1.0}
    assert critic.values(torch.ones(2, 4)) == pytest.approx(1.0)
    critic.keep(torch.ones(3, 4), torch.full((3,), float("nan")))
    assert critic.step() == {}


def rollouts(generator: torch.Generator, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States that differ by a hundredth of their size, in one direction of which lies what the return depends on."""
    states = torch.full((number, 32), 10.0) + 0.05 * torch.randn(number, 32, generator=generator)
    lucky = torch.randint(0, 2, (number,), generator=generator)
    states[:, 3] = 10 + 0.04 * lucky + 0.004 * torch.randn(number, generator=generator)
    won = torch.rand(number, generator=generator) < 0.1 + 0.8 * lucky
    return states, won.float()


def explained(critic: ValueHead, states: torch.Tensor, returns: torch.Tensor) -> float:
    return float(1 - (returns - critic.values(states)).var() / returns.var())


def test_a_critic_explains_what_is_knowable_in_states_that_hardly_differ() -> None:
    generator, critic = torch.Generator().manual_seed(0), ValueHead(32, torch.device("cpu"))
    found = []
    for _ in range(10):
        states, returns = rollouts(generator, 512)
        found.append(explained(critic, states, returns))
        critic.keep(states[:200], returns[:200])
        critic.keep(states[200:], returns[200:])
        critic.step()
    assert found[0] == 0.0
    assert min(found[1:]) > 0.3, "0.64 is knowable"


def test_a_critic_forgets_what_is_no_longer_so_and_goes_on_from_its_state() -> None:
    generator, critic = torch.Generator().manual_seed(0), ValueHead(32, torch.device("cpu"))
    for step in range(40):
        states, returns = rollouts(generator, 512)
        critic.keep(states, returns if step < 10 else 1 - returns)
        critic.step()
    states, returns = rollouts(generator, 512)
    assert explained(critic, states, 1 - returns) > 0.3
    resumed = ValueHead(32, torch.device("cpu"))
    resumed.load(critic.state())
    for one in (critic, resumed):
        one.keep(states, returns)
        one.step()
    assert torch.equal(resumed.values(states), critic.values(states))


def test_the_order_of_the_passes_does_not_matter() -> None:
    states, returns = rollouts(torch.Generator().manual_seed(0), 300)
    whole, parts = ValueHead(32, torch.device("cpu")), ValueHead(32, torch.device("cpu"))
    whole.keep(states, returns)
    for some in torch.arange(300).split(70):
        parts.keep(states[some], returns[some])
    assert whole.step() == pytest.approx(parts.step())
    assert whole.values(states) == pytest.approx(parts.values(states), abs=1e-5)


def test_a_critic_is_trained_beside_the_policy(
    tiny_model_dir: Path, group_of_conversations: list[CreditedCall]
) -> None:
    learner = TorchLearner(load_policy(tiny_model_dir, device="cpu"), LearnerOptions(critic=True))
    calls = [replace(c, returns=np.full(len(c.advantages), 0.7, np.float32)) for c in group_of_conversations]
    batch = pack(calls)
    assert not learner.values(batch).any()
    for _ in range(20):
        learner.forward_backward(batch, LOSS)
        metrics = learner.optim_step(OptimParams(learning_rate=0.0)).metrics
    assert metrics["critic_loss"] < 0.05  # pyright: ignore[reportPossiblyUnboundVariable]
    assert learner.values(batch) == pytest.approx(0.7, abs=0.2)
