"""What an answer is worth: nine tenths for its words, one tenth for its form."""

from __future__ import annotations

import re
from collections import Counter

from .bm25 import words


def earned(text: str, answer: str, searches: int) -> dict[str, float]:
    """The reward, `score`, and what tells how it came about: whether the answer was `right`, whether it was `tagged` as
    it should be, and the number of `searches` before it.
    """
    found = tagged(text)
    right = found is not None and words(found) == words(answer)
    return {
        "score": score(text, answer),
        "right": float(right),
        "tagged": float(found is not None),
        "searches": float(searches),
    }


def score(text: str, answer: str) -> float:
    """0.9 × F1 of the words in <answer>…</answer>, and 0.1 for having exactly one of these; without it, nothing."""
    found = tagged(text)
    return 0.0 if found is None else 0.9 * f1(found, answer) + 0.1


def tagged(text: str) -> str | None:
    """What stands in <answer>…</answer>; None if there is not exactly one of these."""
    found = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    return found[0] if len(found) == 1 else None


def f1(found: str, wanted: str) -> float:
    """The harmonic mean of precision and recall of words, each as often as it occurs."""
    one, other = Counter(words(found)), Counter(words(wanted))
    shared = sum((one & other).values())
    return 2 * shared / (sum(one.values()) + sum(other.values())) if shared else 0.0
