"""A data set of several, mixed by weight: an ordinary data set, whose tasks know which one they are from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from agentlightning.arguments import explained_class
from agentlightning.errors import ConfigError
from agentlightning.types import Dataset


@explained_class
class Mixture:
    """`Mixture({"sums": sums, "stories": stories}, weights={"sums": 0.2, "stories": 0.8})`.

    An epoch takes every task of each data set at least once and the data sets in the shares that the weights say, so a
    small one with a large weight comes around several times. Without weights each counts by its size. Metrics have the
    reward of each by its name.
    """

    def __init__(self, datasets: Mapping[str, Dataset[Any]], weights: Mapping[str, float] | None = None) -> None:
        """Raises ConfigError for an empty data set, or weights that are not one number above 0 for each."""
        if not datasets or any(len(dataset) == 0 for dataset in datasets.values()):
            raise ConfigError("A mixture needs data sets, and each of them at least one task.")
        given = weights if weights is not None else {name: float(len(dataset)) for name, dataset in datasets.items()}
        if set(given) != set(datasets) or not all(math.isfinite(w) and w > 0 for w in given.values()):
            raise ConfigError(
                f"The weights of a mixture are a number above 0 for each of {', '.join(sorted(datasets))}; they are "
                f"{dict(given)!r}."
            )
        self._datasets = dict(datasets)
        size = max(len(dataset) / given[name] for name, dataset in datasets.items())
        self._ends: dict[str, int] = {}
        end = 0
        for name in datasets:
            end += round(size * given[name])
            self._ends[name] = end

    def __len__(self) -> int:
        return max(self._ends.values())

    def __getitem__(self, index: int) -> Any:
        name, within = self._find(index)
        dataset = self._datasets[name]
        return dataset[within % len(dataset)]

    def source(self, index: int) -> str:
        """The name of the data set that a task is from."""
        return self._find(index)[0]

    def first(self, index: int) -> int:
        """The index at which the same task comes first: a data set with a large weight comes around several times."""
        name, within = self._find(index)
        return index - within + within % len(self._datasets[name])

    def _find(self, index: int) -> tuple[str, int]:
        start = 0
        for name, end in self._ends.items():
            if 0 <= index < end:
                return name, index - start
            start = end
        raise IndexError(f"task {index} of {len(self)}")


def first_of(dataset: Dataset[Any], index: int) -> int:
    """The index that stands for a task, of those that a mixture has it at: what is known of it is known once."""
    return dataset.first(index) if isinstance(dataset, Mixture) else index


def source_of(dataset: Dataset[Any], index: int) -> str | None:
    """The data set that a task of a mixture is from; None without a mixture."""
    return dataset.source(index) if isinstance(dataset, Mixture) else None
