"""Which tasks a step takes: every task once per epoch, in an order that only the seed and the epoch decide.

The number of tasks taken so far is the whole position in the data, so a resumed run goes on where it stopped. A part
may choose the tasks instead; an epoch is then as many draws as there are tasks.

A `Mixture` is a data set of several, mixed by weight: an ordinary data set, whose tasks know which one they are from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.part import RunHooks
from agentlightning.arguments import explained_class
from agentlightning.errors import ConfigError
from agentlightning.types import Dataset
from agentlightning.types.arrays import np


class TaskSchedule:
    """`per_step` tasks for each step; the last step of an epoch takes what is left."""

    def __init__(self, dataset: Dataset[Any], per_step: int, seed: int, parts: RunHooks | None = None) -> None:
        """`parts`: those that may choose tasks, add to the metadata of rollouts, and look at what these earned."""
        if len(dataset) == 0:
            raise ConfigError("The training data set is empty. Give at least one task to Trainer.fit(agent, tasks).")
        self._dataset = dataset
        self._seed = seed
        self._parts = parts or RunHooks()
        self.per_step = min(per_step, len(dataset))

    @property
    def size(self) -> int:
        """The number of tasks in an epoch."""
        return len(self._dataset)

    def epochs_taken(self, position: int) -> int:
        """Whole epochs among the first `position` tasks."""
        return position // len(self._dataset)

    def take(self, position: int, count: int, besides: Sequence[int] = ()) -> list[int]:
        """Indices of the tasks that follow the first `position`: `count` of them, or what the epoch has left.

        A part that chooses takes none of `besides`, those that the step has already.
        """
        if (chosen := self._parts.choose(position, count, besides)) is not None:
            return chosen
        epoch, start = divmod(position, len(self._dataset))
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._dataset))
        return [first_of(self._dataset, index) for index in order[start : start + count].tolist()]

    def task(self, index: int) -> Any:
        return self._dataset[index]

    def metadata(self, index: int, step: int, group: int) -> dict[str, Any]:
        """What the metadata of a group's rollouts says of its task: the data set of a mixture, and what parts add."""
        source = source_of(self._dataset, index)
        return {**({} if source is None else {"source": source}), **self._parts.metadata(step, group)}

    async def finished(self, groups: Sequence[Sequence[str]]) -> None:
        """Groups of rollouts have finished and are not yet read from the store."""
        await self._parts.finished(groups)

    def sampled(self, groups: Sequence[tuple[int, Sequence[Episode]]]) -> None:
        """Groups have finished: the index of each one's task, and its rollouts."""
        self._parts.sampled(groups)


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
