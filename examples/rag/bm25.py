"""BM25 over documents in memory (Robertson and Zaragoza, 2009, doi 10.1561/1500000019). Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

K1, B = 1.2, 0.75


class Index:
    """Ranks texts by the words that they share with a query."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._counts = [Counter(words(text)) for text in texts]
        self._lengths = [sum(counts.values()) for counts in self._counts]
        self._mean = sum(self._lengths) / max(1, len(self._lengths))
        self._in_how_many = Counter(word for counts in self._counts for word in counts)

    def best(self, query: str, count: int) -> list[int]:
        """The numbers of the best texts, best first; none that shares no word with the query."""
        asked = set(words(query))
        scores = [(self._score(asked, n), -n) for n in range(len(self._counts))]
        return [-n for score, n in sorted(scores, reverse=True)[:count] if score > 0]

    def _score(self, asked: set[str], n: int) -> float:
        counts, total = self._counts[n], 0.0
        norm = K1 * (1 - B + B * self._lengths[n] / self._mean)
        for word in asked & counts.keys():
            having = self._in_how_many[word]
            rarity = math.log(1 + (len(self._counts) - having + 0.5) / (having + 0.5))
            total += rarity * counts[word] * (K1 + 1) / (counts[word] + norm)
        return total


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
