"""Baselines over time: what a task, or an agent in its role, has earned so far, subtracted from what it earns now.

A moving average b ← decay · b + (1 − decay) · mean of the step, by key; a step is compared with what was known before
it. By task it lets groups of one learn (single-stream policy optimisation, arXiv 2509.13232, with a fixed decay); by
agent it is role-conditioned advantage estimation for self-play, where one role may win more often (SPIRAL, arXiv
2506.24119, section 3.3): there is one for each game (data set of a `Mixture`) and role (agent, and seat in a league).
It is subtracted at a unit's last call, so every way of credit sees it. What is replayed says nothing new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from agentlightning.algorithm.credit.advantage import ADVANTAGES
from agentlightning.algorithm.credit.units import Unit, make_units
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.part import Part, PolicyHooks, PolicyScope, Update
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.arguments import Needs, SettingsGroup, one_of
from agentlightning.types.arrays import np

BaselineKey = Literal["none", "task", "agent"]


class MovingBaselines:
    """One number per key; `values` is its whole state."""

    def __init__(self, key: BaselineKey, decay: float, values: Mapping[str, float] | None = None) -> None:
        self._key = key
        self._decay = decay
        self.values = dict(values or {})

    def subtract(self, episodes: Sequence[Episode], units: Sequence[Unit]) -> dict[str, float]:
        """What to add to the reward of each unit's last call, by call id; then the averages take the step in.

        A key that was never seen stands at the mean of the step.
        """
        earned: dict[str, list[float]] = {}
        counted = [u for u in units if u.counts and u.calls]
        keys = [self._key_of(episodes[u.rollout], u) for u in counted]
        for unit, key in zip(counted, keys, strict=True):
            if not episodes[unit.rollout].replayed:
                earned.setdefault(key, []).append(unit.total)
        mean = float(np.mean([u.total for u in counted])) if counted else 0.0
        found = {u.calls[-1].info.call_id: -self.values.get(key, mean) for u, key in zip(counted, keys, strict=True)}
        for key, totals in earned.items():
            new = float(np.mean(totals))
            self.values[key] = new + self._decay * (self.values.get(key, new) - new)
        return found

    def _key_of(self, episode: Episode, unit: Unit) -> str:
        agent, metadata = unit.group[1] or "", episode.rollout.metadata
        if self._key == "task":
            return f"{metadata.get('task')} {agent}".strip()
        seat = f"seat {metadata['seat']}" if "seat" in metadata else ""
        return " ".join(filter(None, (metadata.get("source"), agent, seat)))


_NO_SIBLINGS = Needs(
    lambda s: not s.compares_siblings and s.credit_mode.compares and s.credit != "hierarchical",
    f"advantage={one_of(ADVANTAGES, lambda one: not one.siblings and not one.selects)}, without a critic, and a "
    "credit other than 'hierarchical', which compares the invocations of an agent with each other",
)
_BASELINE = Needs(lambda s: s.baseline.key != "none", "baseline")


@dataclass(frozen=True, kw_only=True)
class MovingBaseline(SettingsGroup, Part):
    """What earlier steps earned, subtracted: `GRPO(…, baseline=agl.MovingBaseline(key="task"))`."""

    name = "baseline"

    key: Annotated[BaselineKey, _NO_SIBLINGS] = "none"
    """Moving average of earlier returns to subtract, for advantages that do not compare siblings: per task, or per
    agent and role."""
    decay: Annotated[float, Ge(0), Le(1), _BASELINE] = 0.95
    """Decay of that average per step."""

    @classmethod
    def of(cls, settings: TrainingSettings) -> MovingBaseline | None:
        own = cls.given(settings)
        return None if own.key == "none" else own

    def in_policy(self, policy: PolicyScope) -> PolicyHooks:
        return _Subtraction(MovingBaselines(self.key, self.decay))


class _Subtraction(PolicyHooks):
    def __init__(self, baselines: MovingBaselines) -> None:
        self._baselines = baselines

    async def load(self, state: Mapping[str, float]) -> None:
        self._baselines.values |= state

    def state(self) -> dict[str, float]:
        return self._baselines.values

    async def before_credit(self, update: Update) -> None:
        units = make_units(update.episodes, update.rule, update.bonuses)
        update.add_bonuses(self._baselines.subtract(update.episodes, units))
