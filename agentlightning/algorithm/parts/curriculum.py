"""Curricula: which tasks are worth a step, by what their rollouts have earned so far. Pure functions of records.

A curriculum gives each task a weight; a step draws its tasks by them, none twice. One of your own is a function
(`GRPO(curriculum=mine)`). Without one every task comes once per epoch.

Shape letters: T tasks of the data set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from agentlightning.algorithm.credit.units import OUTCOME_USE, Use
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.part import Part, RunHooks, RunScope
from agentlightning.algorithm.sampling.schedule import first_of, source_of
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.arguments import can_be
from agentlightning.errors import ConfigError
from agentlightning.types import Dataset, Outcome
from agentlightning.types.arrays import Array, Float64Array, np

KEPT = 0.5
"""How much of what was known of a task stays at its next visit: the policy has changed meanwhile."""
POOLS = {"easy": 0.25, "medium": 0.5, "hard": 0.25}
"""Shares of a step in the curriculum "pools"."""

Weights = Float64Array


@dataclass(frozen=True, slots=True, eq=False)
class TaskRecords:
    """What is known of each task. Rewards are scaled so that the lowest seen in the run is 0 and the highest 1, in each
    data set of a `Mixture` by itself."""

    visits_T: Array
    """How often a group of its rollouts was sampled; 0: nothing is known, and the others are NaN."""
    reward_T: Weights
    """Mean reward, where later visits count for more."""
    variance_T: Weights
    """Variance of the reward within a group, likewise."""
    last_T: Weights
    """Mean reward at the last visit."""


Weigh = Callable[[TaskRecords], Weights]
"""records → weights_T, at least 0, of which some are above 0."""


def learnability(records: TaskRecords) -> Weights:
    """The variance of the reward within a group, p(1 − p) for rewards of 0 and 1: what group advantages learn from.

    The measure of arXiv 2408.15099 and 2502.12272. Of v visits it is (v · variance + 1/4) / (v + 1): a task that was
    never seen counts as one with even odds, and one that is always solved, or never, comes ever more rarely.
    """
    known_T = np.nan_to_num(records.variance_T) * records.visits_T
    return (known_T + 0.25) / (records.visits_T + 1)


def unsolved(records: TaskRecords) -> Weights:
    """Weighs all tasks alike, except that a task drops out once all its rollouts earned the highest reward."""
    left_T = np.where(records.last_T > 1 - 1e-6, 0.0, 1.0)  # NaN is never solved
    return left_T if left_T.any() else np.ones_like(left_T)


def pools(records: TaskRecords) -> Weights:
    """Fixed shares of easy, medium and hard tasks: mean rewards above 0.75, between, and below 0.25 (see `POOLS`).

    A task that was never seen is of medium difficulty. The share of a pool without tasks goes to the others.
    """
    reward_T = np.where(np.isnan(records.reward_T), 0.5, records.reward_T)
    members = {"easy": reward_T > 0.75, "hard": reward_T < 0.25}
    members["medium"] = ~(members["easy"] | members["hard"])
    return sum(
        (share * members[name] / max(int(members[name].sum()), 1) for name, share in POOLS.items()),
        np.zeros(len(reward_T)),
    )


CURRICULA: dict[str, Weigh] = {"learnability": learnability, "pools": pools, "unsolved": unsolved}


def as_curriculum(given: str | Weigh | None) -> Weigh | None:
    """Makes a curriculum from a name in the table or a function. Raises ConfigError for anything else."""
    if given is None:
        return None
    if isinstance(given, str):
        if given in CURRICULA:
            return CURRICULA[given]
        raise ConfigError(f"curriculum is {given!r}; {can_be(given, CURRICULA, 'a function')}")
    try:
        inspect.signature(given).bind(None)
    except (TypeError, ValueError):
        raise ConfigError(f"curriculum is {given!r}; a function takes the records and gives weights_T.") from None
    return given


class TaskHistory:
    """Takes in what groups earned, and draws tasks by a curriculum."""

    def __init__(
        self,
        weigh: Weigh,
        tasks: int,
        *,
        first: Callable[[int], int] = lambda task: task,
        source: Callable[[int], str | None] = lambda task: None,
    ) -> None:
        """`first`: of tasks that are the same one, which stands for all. `source`: the data set that a task is from."""
        self._weigh = weigh
        self._tasks = tasks
        self._first_T = np.array([first(task) for task in range(tasks)], dtype=np.int64)
        names = [source(task) for task in range(tasks)]
        self._source_T = np.unique([name or "" for name in names], return_inverse=True)[1]
        self._known: dict[int, list[float]] = {}
        """By task: visits, mean reward, variance, last mean reward, lowest and highest reward."""

    def record(self, task: int, rewards: Sequence[float]) -> None:
        """A group of the task's rollouts has earned this."""
        if not rewards:
            return
        mean, variance = float(np.mean(rewards)), float(np.var(rewards))
        visits, before, spread, _, low, high = self._known.get(
            task, [0.0, mean, variance, mean, min(rewards), max(rewards)]
        )
        self._known[task] = [
            visits + 1,
            KEPT * before + (1 - KEPT) * mean,
            KEPT * spread + (1 - KEPT) * variance,
            mean,
            min(low, *rewards),
            max(high, *rewards),
        ]

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go on with the history that a checkpoint has."""
        self._known = {int(task): list(of) for task, of in state.items()}

    @property
    def state(self) -> dict[str, list[float]]:
        """The history of each task, to be saved in a checkpoint."""
        return {str(task): of for task, of in self._known.items()}

    @property
    def records(self) -> TaskRecords:
        """The records of all tasks, as a curriculum gets them."""
        found = np.full((6, self._tasks), np.nan)
        found[0] = 0
        for task, of in self._known.items():
            found[:, task] = of
        found = found[:, self._first_T]
        low_S = np.full(self._source_T.max() + 1, np.inf)
        high_S = -low_S
        np.fmin.at(low_S, self._source_T, found[4])
        np.fmax.at(high_S, self._source_T, found[5])
        low_T, scale_T = low_S[self._source_T], np.maximum(high_S - low_S, 1e-9)[self._source_T]
        reward_T, last_T = (found[1] - low_T) / scale_T, (found[3] - low_T) / scale_T
        return TaskRecords(found[0].astype(np.int64), reward_T, found[2] / scale_T**2, last_T)

    def draw(self, count: int, rng: np.random.Generator, besides: Sequence[int] = ()) -> list[int]:
        """So many different tasks and none of `besides`, fewer where fewer have a weight.

        Raises ConfigError for weights that are none.
        """
        given = self._weigh(self.records)
        try:
            weights_T = np.asarray(given, dtype=np.float64)
        except (TypeError, ValueError):  # no numbers
            weights_T = np.full(self._tasks, np.nan)
        if weights_T.shape != (self._tasks,) or not np.isfinite(weights_T).all() or (weights_T < 0).any():
            name = getattr(self._weigh, "__qualname__", repr(self._weigh))
            gave = f"it gave shape {weights_T.shape}" if weights_T.shape != (self._tasks,) else "it gave others"
            raise ConfigError(
                f"The curriculum {name} must give a finite weight of at least 0 for each of {self._tasks} tasks; "
                f"{gave}."
            )
        if not weights_T.any():
            raise ConfigError("The curriculum gives no task a weight above 0, so there is nothing to sample.")
        left_T = np.where(np.isin(self._first_T, besides), 0.0, weights_T)
        possible = int((left_T > 0).sum())
        if not possible:
            return []
        chosen = rng.choice(self._tasks, min(count, possible), replace=False, p=left_T / left_T.sum())
        return self._first_T[chosen].tolist()


@dataclass(frozen=True, kw_only=True)
class DrawnTasks(Part):
    """A step's tasks are drawn by what they have earned."""

    name = "curriculum"

    weigh: Weigh

    @classmethod
    def of(cls, settings: TrainingSettings) -> Self | None:
        weigh = as_curriculum(settings.curriculum)
        return None if weigh is None else cls(weigh=weigh)

    @classmethod
    def check(cls, settings: TrainingSettings) -> None:
        as_curriculum(settings.curriculum)

    def in_run(self, run: RunScope) -> RunHooks:
        return TaskDraw(self.weigh, run.tasks, run.settings.seed, run.settings.outcome_use)


class TaskDraw(RunHooks):
    """Draws a step's tasks; the same ones at the same position for the same history and seed."""

    def __init__(
        self, weigh: Weigh, tasks: Dataset[Any], seed: int = 0, uses: Mapping[Outcome, Use] = OUTCOME_USE
    ) -> None:
        """`uses`: what rollouts of an outcome are worth; those that are left out say nothing of their task."""
        self._seed = seed
        self._uses = uses
        self.history = TaskHistory(
            weigh, len(tasks), first=lambda task: first_of(tasks, task), source=lambda task: source_of(tasks, task)
        )

    async def load(self, state: Mapping[str, Sequence[float]]) -> None:
        self.history.load(state)

    def state(self) -> dict[str, list[float]]:
        return self.history.state

    def choose(self, position: int, count: int, besides: Sequence[int]) -> list[int]:
        return self.history.draw(count, np.random.default_rng([self._seed, position]), besides)

    def sampled(self, groups: Sequence[tuple[int, Sequence[Episode]]]) -> None:
        for task, episodes in groups:
            rewards = [e.reward for e in episodes if e.reward is not None and self._uses[e.outcome] != "mask"]
            self.history.record(task, rewards)
