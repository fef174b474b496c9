"""BM25 over documents in memory (Robertson and Zaragoza, 2009, doi 10.1561/1500000019). Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

K1, B = 1.2, 0.75
SHOWN = 3
"""Documents that a search shows."""


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


class Library:
    """Documents of {"title", "text"}, to be searched."""

    def __init__(self, documents: Sequence[Mapping[str, str]]) -> None:
        self._texts = [document["text"] for document in documents]
        self._index = Index([f"{document['title']} {document['text']}" for document in documents])

    def search(self, query: str) -> str:
        """The best documents, a line each."""
        return "\n".join(self._texts[n] for n in self._index.best(query, SHOWN)) or "nothing found"


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
