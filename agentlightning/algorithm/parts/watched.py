"""Watched parts of a reward: graders that train nothing, and of which a run says when they fall while the trained
reward rises: the policy may have learned what the grader pays for instead of what it was written for.

This is an audit, no early warning: both movements must be large enough to be told from noise (`trend`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.part import Part, RunHooks, RunRecord, RunScope
from agentlightning.algorithm.rollout_verdicts import absent_part
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.algorithm.verdicts import FALSE_ALARMS, fall_of, has_risen
from agentlightning.errors import ConfigError
from agentlightning.types.finding import Finding, problem

if TYPE_CHECKING:
    from agentlightning.algorithm.episode import Sampled

BEST = 5
"""So many of the best-paid rollouts are named, to be read."""


def audit(name: str, rewards: Sequence[float], watched: Sequence[float], best: Sequence[str]) -> Finding | None:
    """Whether the part `name` has fallen while the reward rose; both are means of the same steps, in order.

    `best`: ids of the rollouts that were paid best lately.
    """
    if not watched or not has_risen(rewards):
        return None
    fall = fall_of(watched, max(watched) - min(watched))
    if fall is None:
        return None
    return problem(
        "watched_part_fell",
        f"The reward has risen, and its part '{name}', which is watched and trains nothing, has fallen from "
        f"{fall.best:.3g} to {fall.now:.3g}. {FALSE_ALARMS}",
        f"Read the rollouts that were paid best (agl show): {', '.join(best)}. If they are not what you want, mend the "
        f"grader that trains, or give '{name}' a weight in reward_weights.",
        part=name,
        best=fall.best,
        now=fall.now,
        rollouts=list(best),
    )


def best_paid(episodes: Sequence[Episode]) -> list[str]:
    """The ids of the rollouts with the highest rewards, the highest first."""
    paid = sorted((e for e in episodes if e.reward is not None), key=lambda e: -(e.reward or 0.0))
    return [e.rollout.rollout_id for e in paid[:BEST]]


@dataclass(frozen=True, kw_only=True)
class Watched(Part):
    """Present where a run has parts of a reward to watch."""

    names: Sequence[str]

    @classmethod
    def of(cls, settings: TrainingSettings) -> Self | None:
        return cls(names=tuple(settings.watched_parts)) if settings.watched_parts else None

    @classmethod
    def check(cls, settings: TrainingSettings) -> None:
        names = settings.watched_parts
        listed = isinstance(names, Iterable) and not isinstance(names, str)
        if not listed or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"watched_parts is {names!r}; it takes a list of names, for example ['careful'].")
        if trained := [name for name in names if settings.reward_weights.get(name)]:
            raise ConfigError(
                f"watched_parts has {trained[0]!r}, which has a weight in reward_weights and trains. Watch a part "
                "without a weight."
            )

    @classmethod
    def findings(cls, record: RunRecord) -> Iterator[Finding]:
        for name in record.settings.get("watched_parts") or ():
            rows = [row for row in record.steps if row.get("reward") is not None and f"reward/{name}" in row]
            watched = [row[f"reward/{name}"] for row in rows]
            found = audit(name, [row["reward"] for row in rows], watched, best_paid(record.episodes))
            if found is not None:
                yield found

    def in_run(self, run: RunScope) -> RunHooks:
        return _Watching(self.names, run)


class _Watching(RunHooks):
    def __init__(self, names: Sequence[str], run: RunScope) -> None:
        self._names = names
        self._reporter = run.context.reporter
        self._series: dict[str, list[list[float]]] = {name: [] for name in names}
        """By part: the reward and the part's mean, of each step."""
        self._best: list[str] = []
        self._reported: set[str] = set()

    async def load(self, state: Mapping[str, list[list[float]]]) -> None:
        self._series |= {name: list(pairs) for name, pairs in state.items() if name in self._names}

    def state(self) -> dict[str, list[list[float]]]:
        return self._series

    def measure(self, sampled: Sampled) -> Mapping[str, Any]:
        self._best = best_paid(sampled.episodes)
        return {}

    def after_step(self, metrics: Mapping[str, Any]) -> None:
        parts = sorted(key.removeprefix("reward/") for key in metrics if key.startswith("reward/"))
        for name, pairs in self._series.items():
            if name in parts and metrics.get("reward") is not None:
                pairs.append([metrics["reward"], metrics[f"reward/{name}"]])
            elif not pairs:
                self._say_absent(name, parts)
            found = audit(name, [pair[0] for pair in pairs], [pair[1] for pair in pairs], self._best)
            if found is not None and name not in self._reported:
                self._reported.add(name)
                self._reporter.verdict(str(found))

    def _say_absent(self, name: str, parts: Sequence[str]) -> None:
        if name not in self._reported:
            self._reported.add(name)
            self._reporter.warn(absent_part(name, " of watched_parts", parts))
