"""Decoding passes that are recorded once per size. A recording of CUDA's is stood in for by one that computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from agentlightning.engine import graphs, slot_model
from agentlightning.engine.graphs import DecodeGraphs, Replay, context_sizes, row_sizes
from agentlightning.engine.torch_engine import TorchEngine
from agentlightning.learner.policy import Policy
from tests.engine.conftest import gap, make_engine, random_ids, request, run


class Computed(DecodeGraphs):
    """As on a GPU: a pass always writes its logits to the same place, and reads what it was given from one."""

    def _capture(self, work: Callable[[], object]) -> Replay:
        return lambda: (work(), None)[1]


@pytest.fixture
def recorded(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[TorchEngine, DecodeGraphs]]:
    def made(kind: type[DecodeGraphs] = Computed, **settings: Any) -> tuple[TorchEngine, DecodeGraphs]:
        monkeypatch.setattr(slot_model, "DecodeGraphs", kind)
        engine = make_engine(policy, **{"max_context": 400, "max_concurrency": 12, **settings})
        model: Any = engine._model
        model.record_graphs()
        return engine, model.graphs

    return made


def requests(count: int) -> list[Any]:
    """Of many lengths, half of them with a shared beginning."""
    rng, shared = np.random.default_rng(0), random_ids(90, 1)
    found = []
    for number in range(count):
        own = random_ids(int(rng.integers(1, 120)), number)
        prompt = np.concatenate([shared, own]) if number % 2 else own
        found.append(request(number, prompt, max_tokens=int(rng.integers(1, 80)), ignore_eos=True))
    return found


def test_log_probs_are_those_of_a_plain_forward(policy: Policy, recorded: Any) -> None:
    engine, kept = recorded()
    asked = requests(40)
    found = run(engine, asked)
    assert max(gap(policy, one, found[one.request_id]) for one in asked) < 1e-4
    assert 4 < len(kept._recorded) < len(kept._met)
    rows, tokens = ({key[side] for key in kept._recorded} for side in (0, 1))
    assert rows <= set(row_sizes(engine.contexts.slots))
    assert tokens <= set(context_sizes(engine.contexts.model.capacity))


def test_only_so_many_are_kept(policy: Policy, recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 3)
    engine, kept = recorded()
    asked = requests(20)
    found = run(engine, asked)
    assert max(gap(policy, one, found[one.request_id]) for one in asked) < 1e-4
    assert len(kept._recorded) == 3


@pytest.mark.parametrize("fault", ["raises", "off", "nothing"])
def test_what_cannot_be_recorded_is_computed_as_usual(
    policy: Policy, recorded: Any, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty(Computed):
        def _capture(self, work: Callable[[], object]) -> Replay:
            if fault == "raises":
                raise RuntimeError("operation not permitted when stream is capturing\nand more")

            def replay() -> None:
                work()
                self._logits.copy_(self._logits.roll(1, -1) if fault == "off" else self._logits * torch.nan)

            return replay

    engine, kept = recorded(Faulty)
    asked = requests(8)
    found = run(engine, asked)
    assert max(gap(policy, one, found[one.request_id]) for one in asked) < 1e-4
    assert not kept.works
    (line,) = [record.getMessage() for record in caplog.records if "CUDA graphs" in record.getMessage()]
    assert {"raises": "capturing.", "off": "off.", "nothing": "nan off."}[fault] in line
    assert "and more" not in line


def test_weights_that_changed_in_place_are_read_and_others_are_recorded_anew(policy: Policy, recorded: Any) -> None:
    engine, kept = recorded()
    one = request(1, random_ids(20, 1), max_tokens=10, ignore_eos=True)
    for _ in range(2):
        run(engine, [one])
    before = dict(kept._recorded)
    assert before
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(0.9)
    engine.weights_changed(1)
    assert kept._recorded == before
    assert gap(policy, one, run(engine, [one])[1]) < 1e-4
    norm: Any = policy.model.get_submodule("model.norm")
    norm.weight.data = norm.weight.data * 1.5
    engine.weights_changed(2)
    assert not kept._recorded
    assert gap(policy, one, run(engine, [one])[1]) < 1e-4


@pytest.mark.parametrize("end", [1, 3, 8, 13, 128, 1000, 4097])
def test_a_size_is_at_most_half_as_large_again_as_what_it_is_for(end: int) -> None:
    for sizes, least in ((row_sizes(end), 8), (context_sizes(end), graphs.FEWEST_TOKENS)):
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == end
        for wanted in range(1, end + 1):
            size = graphs._at_least(sizes, wanted)
            assert wanted <= size <= max(wanted * (5 / 4 if wanted > graphs.LONG else 3 / 2), least)
    assert len(row_sizes(64)) * len(context_sizes(4096)) < graphs.MOST_GRAPHS
