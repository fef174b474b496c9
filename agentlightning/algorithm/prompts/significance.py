"""Whether a candidate is better than the incumbent on the same tasks, told so that one may look after every task. Pure.

The evidence is the capital of a gambler who bets that the mean of the paired differences is above zero, starting from
one. Under the hypothesis that it is not, the capital is a nonnegative supermartingale with mean at most 1, so by
Ville's inequality it ever reaches 1/α with probability at most α, however often it is looked at and whenever one stops.

Source: Waudby-Smith & Ramdas, "Estimating means of bounded random variables by betting", JRSS B 86 (2024), arXiv
2010.09686, section 4; the bets are mixed over a grid (Robbins' method of mixtures) instead of chosen on the way, which
makes the capital independent of the order of the differences.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

_BETS = tuple(0.05 * n for n in range(1, 20))
"""Fractions of the capital that are staked; below 1, so that no difference within the bounds ruins a gambler."""


def evidence(differences: Sequence[float], width: float = 1.0) -> float:
    """The e-value of "candidate minus incumbent has a positive mean": the mean over λ of Π (1 + λ d/width).

    `differences` holds a reward difference per task, each within ±`width`; no difference gives 1. Raises ValueError for
    one that is outside: the bound is what the guarantee rests on.
    """
    counts = Counter(d / width for d in differences)
    furthest = max(map(abs, counts), default=0.0)
    if furthest > 1.0 + 1e-9:
        raise ValueError(f"A difference of {furthest * width:g} is outside of ±{width:g}.")
    logs = [sum(n * math.log1p(bet * max(-1.0, min(1.0, d))) for d, n in counts.items()) for bet in _BETS]
    top = max(logs)
    return math.exp(min(top, 700.0)) * sum(math.exp(log - top) for log in logs) / len(logs)


def least_gain(differences: Sequence[float], needed: float, width: float = 1.0) -> float:
    """The largest gain that the evidence is enough for: the mean is below it with a probability of 1/`needed` at most,
    however often one has looked. It is −`width` where there is no evidence of anything.
    """
    low, high = -width, width
    for _ in range(40):
        middle = (low + high) / 2
        shifted = [(d - middle) / (width + abs(middle)) for d in differences]
        low, high = (middle, high) if evidence(shifted) >= needed else (low, middle)
    return low


def threshold(alpha: float, tests: int) -> float:
    """The e-value that one of at most `tests` comparisons must reach, so that all of them together err with `alpha`.

    Bonferroni's bound: tests/alpha. Candidates that were chosen by looking at several count as so many tests.
    """
    return tests / alpha
