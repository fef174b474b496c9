"""The maths of sampling: frequencies, filters, and both kinds of log-probs against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentlightning.engine.base import SamplingParams
from agentlightning.engine.running import shift_of
from agentlightning.engine.sampler import RowSettings, draw

VOCABULARY = 12


def settings(
    rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> RowSettings:
    return RowSettings(np.full(rows, temperature), np.full(rows, top_k), np.full(rows, top_p), np.full(rows, min_p))


def expected(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> np.ndarray:
    """The sampling distribution by its definition, one token after the other."""
    scaled = np.exp(logits.astype(np.float64) / temperature)
    probs = scaled / scaled.sum()
    order = np.argsort(-probs, kind="stable")[: top_k or len(probs)]
    left = probs[order] / probs[order].sum()
    kept: list[int] = []
    for place, token in enumerate(order):
        if place and (left[:place].sum() >= top_p or probs[token] < min_p * probs.max()):
            break
        kept.append(int(token))
    out = np.zeros_like(probs)
    out[kept] = probs[kept] / probs[kept].sum()
    return out


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.0, 3, 1.0, 0.0),
        (1.0, 0, 0.6, 0.0),
        (1.3, 6, 0.7, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.0, 0, 1e-6, 0.0),
        (1.0, 0, 1.0, 0.1),
        (1.5, 7, 0.95, 0.05),
        (1.0, 0, 1.0, 1.0),
    ],
)
def test_draws_follow_the_definition(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = np.random.default_rng(3).normal(size=VOCABULARY).astype(np.float32) * 2
    rows = 4000
    # Evenly spaced numbers: frequencies are exact up to one row per token.
    uniform = (np.arange(rows) + 0.5) / rows
    drawn = draw(torch.from_numpy(logits).expand(rows, -1), settings(rows, temperature, top_k, top_p, min_p), uniform)
    probs = expected(logits, temperature, top_k, top_p, min_p)
    frequencies = np.bincount(drawn.ids, minlength=VOCABULARY) / rows
    np.testing.assert_allclose(frequencies, probs, atol=1.5 / rows)
    np.testing.assert_allclose(drawn.logprobs, np.log(probs[drawn.ids]), atol=1e-5)
    plain = torch.from_numpy(logits / temperature).log_softmax(-1).numpy()
    np.testing.assert_allclose(drawn.plain_logprobs, plain[drawn.ids], atol=1e-5)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8), (1.5, 1.0)])
def test_shifted_logits_are_what_is_drawn_from(temperature: float, top_p: float) -> None:
    """The plain log-prob stays that of the policy, so a drawn token is recorded as drawn under a filter."""
    rng, rows = np.random.default_rng(4), 4000
    logits, shift = (rng.normal(size=VOCABULARY).astype(np.float32) * 2 for _ in range(2))
    uniform, one = (np.arange(rows) + 0.5) / rows, torch.from_numpy(shift)
    batch = torch.from_numpy(logits).expand(rows, -1)
    drawn = draw(batch, settings(rows, temperature, 0, top_p), uniform, shifts=dict.fromkeys(range(rows), one))
    probs = expected(logits + shift, temperature, 0, top_p)
    np.testing.assert_allclose(np.bincount(drawn.ids, minlength=VOCABULARY) / rows, probs, atol=1.5 / rows)
    np.testing.assert_allclose(drawn.logprobs, np.log(probs[drawn.ids]), atol=1e-5)
    plain = torch.from_numpy(logits / temperature).log_softmax(-1).numpy()
    np.testing.assert_allclose(drawn.plain_logprobs, plain[drawn.ids], atol=1e-5)
    greedy = draw(batch[:1], settings(1, 0.0), uniform[:1], shifts={0: one})
    assert greedy.ids.tolist() == [int((logits + shift).argmax())]


def test_penalties_by_hand() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={3: -100.0, 0: 1.0})
    shift = shift_of(params, np.array([1, 2, 2], np.int32), np.zeros(5, np.bool_))
    assert shift.tolist() == pytest.approx([1.0, -0.75, -1.0, -100.0, 0.0])
    assert not SamplingParams().shifts_logits


@pytest.mark.parametrize("spread", [3.0, 0.01])
def test_few_candidates_are_enough_or_all_are_sorted(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a peaked and with a flat distribution over a large vocabulary, what comes out is that of sorting it all."""
    rng = np.random.default_rng(5)
    logits = torch.from_numpy((rng.normal(size=(8, 20_000)) * spread).astype(np.float32))
    filters = RowSettings(np.ones(8), np.zeros(8, int), np.array([0.9, 0.5] * 4), np.array([0.0] * 6 + [0.3] * 2))
    uniform = rng.random(8)
    found = draw(logits, filters, uniform)
    monkeypatch.setattr("agentlightning.engine.sampler.CANDIDATES", 20_000)
    whole = draw(logits, filters, uniform)
    assert found.ids.tolist() == whole.ids.tolist()
    np.testing.assert_allclose(found.logprobs, whole.logprobs, atol=1e-5)


def test_rows_do_not_influence_each_other() -> None:
    rng = np.random.default_rng(0)
    rows = 64
    logits = torch.from_numpy(rng.normal(size=(rows, VOCABULARY)).astype(np.float32))
    mixed = RowSettings(
        rng.choice([0.0, 0.5, 1.0, 2.0], rows),
        rng.choice([0, 2, 50], rows),
        rng.choice([1.0, 0.5, 0.9], rows),
        rng.choice([0.0, 0.1], rows),
    )
    uniform = rng.random(rows)
    together = draw(logits, mixed, uniform)
    for row in range(rows):
        one = slice(row, row + 1)
        own = RowSettings(mixed.temperature[one], mixed.top_k[one], mixed.top_p[one], mixed.min_p[one])
        alone = draw(logits[one], own, uniform[one])
        assert alone.ids[0] == together.ids[row]
        np.testing.assert_allclose(alone.logprobs[0], together.logprobs[row], atol=1e-6)
        np.testing.assert_allclose(alone.plain_logprobs[0], together.plain_logprobs[row], atol=1e-6)


def test_the_ends_of_the_interval_never_draw_an_impossible_token() -> None:
    logits = torch.full((2, VOCABULARY), -float("inf"))
    logits[:, 3:5] = 0
    drawn = draw(logits, settings(2), np.array([0.0, np.nextafter(1.0, 0.0)]))
    assert drawn.ids.tolist() == [3, 4]
    filtered = draw(logits, settings(2, top_p=0.99), np.array([0.0, np.nextafter(1.0, 0.0)]))
    assert set(filtered.ids.tolist()) == {3, 4}


def test_greedy_rows() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    drawn = draw(logits, settings(1, temperature=0.0, top_p=0.5), np.array([0.999]))
    assert drawn.ids.tolist() == [1]
    assert drawn.logprobs.tolist() == [0]
    np.testing.assert_allclose(drawn.plain_logprobs, logits.log_softmax(-1)[:, 1].numpy(), atol=1e-6)
