"""A packed batch as rows for verl's workers: nothing lost or doubled, and our loss of rows is that of trees."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from agentlightning.learner.base import LossConfig, PackedBatch
from agentlightning.learner.packing import CreditedCall, pack
from agentlightning.learner.policy import Policy
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.learner.verl.loss import SUM, row_loss
from agentlightning.learner.verl.rows import Row, passes_of, rows_of
from tests.learner.conftest import MakeCall


@pytest.fixture
def batch(group_of_conversations: list[CreditedCall]) -> PackedBatch:
    forest = pack(group_of_conversations)
    cold = forest.sequence_E % 3 == 0
    return msgspec.structs.replace(forest, temperature_E=np.where(cold, 0.7, 1.0).astype(np.float32))


def check(row: Row, batch: PackedBatch) -> None:
    """Each entry's target comes next, behind all that its source stands on, at the row's temperature."""
    np.testing.assert_array_equal(row.ids_L[row.sources_R + 1], batch.targets_E[row.entries_R])
    np.testing.assert_array_equal(row.ids_L[row.sources_R], batch.ids_N[batch.source_E[row.entries_R]])
    assert set(batch.temperature_E[row.entries_R].tolist()) == {np.float32(row.temperature)}


def test_each_entry_is_in_one_row_where_its_target_comes_next(batch: PackedBatch) -> None:
    rows = list(rows_of(batch))
    assert sorted(np.concatenate([row.entries_R for row in rows]).tolist()) == list(range(len(batch.source_E)))
    for row in rows:
        check(row, batch)
    assert len({row.temperature for row in rows}) == 2


def test_siblings_that_sampled_the_same_are_both_learned(make_call: MakeCall) -> None:
    """At the same place in the tree, and, where they part, in rows of their own."""
    prompt, same = np.array([5, 6, 7], np.int32), [8, 9]
    calls = [make_call(prompt, np.array([*same, last], np.int32), sequence=n) for n, last in enumerate((10, 11))]
    batch = pack(calls)
    rows = list(rows_of(batch))
    assert sorted(len(row.entries_R) for row in rows) == [1, 5]
    for row in rows:
        check(row, batch)


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("whole_groups", [False, True])
def test_workers_have_as_many_rows_and_units_stay_whole(batch: PackedBatch, workers: int, whole_groups: bool) -> None:
    unit_E = batch.group_E if whole_groups else batch.sequence_E
    for row_tokens in (40, 8192):
        passes = passes_of(batch, workers, whole_groups=whole_groups, row_tokens=row_tokens)
        assert len(passes) == 1 or row_tokens == 40
        assert len(passes) > 1 or row_tokens != 40 or workers > 1
        parts = [rows for one in passes for rows in one]
        entries = [np.concatenate([row.entries_R for row in rows]) for rows in parts]
        assert sorted(np.concatenate(entries).tolist()) == list(range(len(unit_E)))
        units = [unit for found in entries for unit in set(unit_E[found].tolist())]
        assert len(units) == len(set(units))
        for one in passes:
            assert len(one) == workers
            assert len({len(rows) for rows in one}) == 1
            assert any(len(row.entries_R) for rows in one for row in rows)


def nested(arrays: list[np.ndarray]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.from_numpy(a) for a in arrays], layout=torch.jagged)


def engine_says(policy: Policy, rows: list[Row]) -> dict[str, torch.Tensor]:
    """What verl's engine makes of rows: log-probs and entropies at all their tokens, of the next one; here one by one
    with the model's own forward."""
    logprobs, entropies = [], []
    for row in rows:
        ids = torch.from_numpy(row.ids_L.astype(np.int64))
        known = (policy.model(input_ids=ids[None]).logits[0] / row.temperature).log_softmax(-1)
        logprobs.append(known.gather(1, ids.roll(-1)[:, None])[:, 0])
        entropies.append(-(known.exp() * known).sum(-1).detach())
    both = (torch.nested.as_nested_tensor(found, layout=torch.jagged) for found in (logprobs, entropies))
    return dict(zip(("log_probs", "entropy"), both, strict=True))


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "sapo"])
def test_the_loss_of_rows_is_that_of_the_tree(policy: Policy, batch: PackedBatch, loss: str) -> None:
    learner = TorchLearner(policy)
    expected = learner.forward_backward(batch, LossConfig(name=loss))
    whole = [p.grad.clone() for p in policy.trainable() if p.grad is not None]
    learner.take_gradient()
    (one,) = passes_of(batch, 2, whole_groups=False)
    found: dict[str, float] = {}
    for rows in one:
        data = {
            "sources": nested([row.sources_R for row in rows]),
            "old": nested([batch.old_logprobs_E[row.entries_R] for row in rows]),
            "advantages": nested([batch.advantages_E[row.entries_R] for row in rows]),
            "weights": nested([batch.weights_E[row.entries_R] for row in rows]),
            "sequence": nested([batch.sequence_E[row.entries_R] for row in rows]),
            "group": nested([batch.group_E[row.entries_R] for row in rows]),
            "dp_size": 2,
        }
        value, sums = row_loss(LossConfig(name=loss), engine_says(policy, rows), data)
        (value / 2).backward()  # as verl averages the gradients of two workers
        found = {name: found.get(name, 0.0) + number for name, number in sums.items()}
    assert found[f"{SUM}total"] == pytest.approx(expected.loss, rel=1e-5)
    assert found[f"{SUM}entries"] == len(batch.source_E)
    for name, mean in expected.metrics.items():
        assert found[f"{SUM}{name}"] / len(batch.source_E) == pytest.approx(mean, rel=1e-4, abs=1e-6)
    ours = [p.grad for p in policy.trainable() if p.grad is not None]
    for a, b in zip(ours, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))
