"""How often equal candidates are promoted, measured; and that real gains are seen."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from agentlightning.algorithm.prompts.significance import evidence, threshold

RUNS, TASKS, EVERY = 1000, 60, 12
Draw = Callable[[np.random.Generator, int], np.ndarray]


def coin(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.integers(0, 2, size).astype(float)


def beta(rng: np.random.Generator, size: int) -> np.ndarray:
    return np.round(rng.beta(0.3, 0.7, size), 1)


def rare(rng: np.random.Generator, size: int) -> np.ndarray:
    """Nearly all tasks are earned alike."""
    return (rng.random(size) < 0.97).astype(float)


def promoted(rng: np.random.Generator, draw: Draw, candidates: int, alpha: float) -> bool:
    """A run that looks at the best of several candidates after every few tasks; all are as good as the incumbent."""
    incumbent = draw(rng, TASKS)
    rewards = np.stack([draw(rng, TASKS) for _ in range(candidates)])
    needed = threshold(alpha, candidates)
    for seen in range(EVERY, TASKS + 1, EVERY):
        best = int(rewards[:, :seen].mean(axis=1).argmax())
        if evidence((rewards[best, :seen] - incumbent[:seen]).tolist()) >= needed:
            return True
    return False


@pytest.mark.quick_with("coin", "rare-1")
@pytest.mark.parametrize("candidates", [1, 8])
@pytest.mark.parametrize("draw", [coin, beta, rare])
def test_equal_candidates_are_promoted_less_often_than_the_level_says(draw: Draw, candidates: int) -> None:
    rng = np.random.default_rng(0)
    false = sum(promoted(rng, draw, candidates, alpha=0.1) for _ in range(RUNS))
    assert false / RUNS <= 0.1


def test_a_check_without_correction_for_looking_would_err_more_often() -> None:
    """The simulation can fail: a plain one-sided z-test at the same level, looked at as often, does."""
    rng = np.random.default_rng(0)
    false = 0
    for _ in range(RUNS):
        differences = coin(rng, TASKS) - coin(rng, TASKS)
        seen = range(EVERY, TASKS + 1, EVERY)
        scores = [differences[:n].mean() / (differences[:n].std(ddof=1) / n**0.5 + 1e-9) for n in seen]
        false += max(scores) >= 1.2816
    assert false / RUNS > 0.15


def test_a_real_gain_is_seen() -> None:
    rng = np.random.default_rng(0)
    seen = 0
    for _ in range(100):
        base = rng.random(TASKS) < 0.5
        better = base | (rng.random(TASKS) < 0.5)
        seen += evidence((better.astype(float) - base).tolist()) >= threshold(0.05, 12)
    assert seen >= 80


def test_order_does_not_matter_and_nothing_is_no_evidence() -> None:
    differences = [0.5, -0.2, 1.0, 0.0]
    assert evidence(differences) == pytest.approx(evidence(differences[::-1]))
    assert evidence([]) == 1.0
    assert evidence([2.0, -1.0], width=2.0) == pytest.approx(evidence([1.0, -0.5]))


def test_a_difference_out_of_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="outside of"):
        evidence([1.5])
