"""What an answer is worth: nine tenths for its words, one tenth for its form."""

from __future__ import annotations

import re
from collections import Counter

from .bm25 import words


def score(text: str, answer: str) -> float:
    """0.9 × F1 of the words in <answer>…</answer>, and 0.1 for having exactly one of these; without it, nothing."""
    found = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    return 0.9 * f1(found[0], answer) + 0.1 if len(found) == 1 else 0.0


def f1(found: str, wanted: str) -> float:
    """The harmonic mean of precision and recall of words, each as often as it occurs."""
    one, other = Counter(words(found)), Counter(words(wanted))
    shared = sum((one & other).values())
    return 2 * shared / (sum(one.values()) + sum(other.values())) if shared else 0.0
