"""A replay buffer: groups of earlier steps that are learned again, beside the fresh ones.

Groups are drawn without replacement with a probability ∝ p^α, p being how far the rewards of a group's rollouts are
apart (their standard deviation): prioritised replay (Schaul et al., arXiv 1511.05952, eq. 1), with the spread of the
rewards in place of the error of a value; α = 0 draws all alike. Groups whose rollouts all earned the same are not kept,
and the oldest leave first. What is learned again was sampled by older weights, so it has importance weights
(`correction`), as anything that is off-policy.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from agentlightning.algorithm.credit.assignment import groups_to_learn_from, looked_at
from agentlightning.algorithm.credit.units import CreditRule
from agentlightning.algorithm.episode import Episode, collect
from agentlightning.algorithm.part import Part, RunHooks, RunScope
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.arguments import Needs, SettingsGroup
from agentlightning.metrics.catalogue import INTERNALS, TOKENS, Metric
from agentlightning.store.base import LightningStore
from agentlightning.types.arrays import Float64Array, np

if TYPE_CHECKING:
    from agentlightning.algorithm.episode import Sampled


@dataclass(frozen=True, slots=True, eq=False)
class KeptGroup:
    """A group of siblings that is kept for replay, with its priority."""

    episodes: Sequence[Episode]
    priority: float


class ReplayBuffer:
    """The groups of a run that may be learned again; oldest first."""

    def __init__(self, size: int, alpha: float, seed: int) -> None:
        self._size = size
        self._alpha = alpha
        self._seed = seed
        self.kept: list[KeptGroup] = []

    def draw(self, groups: int, step: int) -> list[Episode]:
        """The rollouts of so many groups (or of all there are), the same ones for the same step."""
        count = min(groups, len(self.kept))
        if not count:
            return []
        rng = np.random.default_rng([self._seed, step])
        p = chances([k.priority for k in self.kept], self._alpha)
        drawn = rng.choice(len(self.kept), count, replace=False, p=p)
        return [replace(e, replayed=True) for n in sorted(drawn.tolist()) for e in self.kept[n].episodes]

    def add(self, episodes: Sequence[Episode], teaching: set[Hashable], rule: CreditRule | None = None) -> None:
        """Take in the rollouts of a step, of those groups that teach anything by `rule`."""
        groups: dict[Hashable, list[Episode]] = {}
        for e in episodes:
            if (group := e.rollout.metadata.get("group")) in teaching:
                groups.setdefault(group, []).append(e)
        found = [
            KeptGroup(siblings, max(spread(s.episodes) for s in looked_at(siblings, rule or CreditRule())))
            for siblings in groups.values()
        ]
        self.kept = [*self.kept, *(k for k in found if k.priority > 0)][-self._size :]

    @property
    def state(self) -> list[dict[str, Any]]:
        """The ids of the kept rollouts, to be saved in a checkpoint; their tokens are in the store."""
        return [{"rollouts": [e.rollout.rollout_id for e in k.episodes], "priority": k.priority} for k in self.kept]

    async def return_to(
        self, store: LightningStore, state: Sequence[Mapping[str, Any]], weights: Mapping[str, float]
    ) -> None:
        """Go on with the groups of an interrupted run, as far as the store still has them."""
        read = await collect(store, [i for one in state for i in one["rollouts"]], weights) if state else []
        found = {e.rollout.rollout_id: e for e in read}
        whole = [one for one in state if found.keys() >= {*one["rollouts"]}]
        self.kept = [KeptGroup([found[i] for i in one["rollouts"]], one["priority"]) for one in whole]


def chances(priorities: Sequence[float], alpha: float) -> Float64Array:
    """P(i) = p_i^α / Σ p_j^α."""
    powers = np.asarray(priorities, dtype=np.float64) ** alpha
    return powers / powers.sum()


def spread(siblings: Sequence[Episode]) -> float:
    """The standard deviation of what they earned; 0 where fewer than two earned anything.

    Where agents are rewarded apart it is the largest one of theirs: what two of them earn in a zero-sum game is
    together always the same.
    """
    earned: dict[str | None, list[float]] = {}
    for e in siblings:
        if e.good and e.reward is not None:
            own = {r.agent: r.value for r in e.rewards if r.agent is not None}
            for agent, value in {None: e.reward, **own}.items():
                earned.setdefault(agent, []).append(value)
    return max((float(np.std(values)) for values in earned.values() if len(values) > 1), default=0.0)


_REWARDED = Needs(
    lambda s: not s.is_supervised and not s.credit_mode.teacher,
    "an algorithm that learns from rewards: SFT and DPO choose what is good, and a teacher gives none",
)
_REPLAY = Needs(lambda s: s.replay.groups > 0, "replay")


@dataclass(frozen=True, kw_only=True)
class Replay(SettingsGroup, Part):
    """Groups of earlier steps that each step learns again: `GRPO(…, replay=agl.Replay(groups=4))`."""

    metrics = (
        Metric(
            "replayed",
            "Replayed rollouts",
            TOKENS,
            "rollouts",
            "With `replay`: rollouts of earlier steps that were learned again.",
        ),
        Metric(
            "replayed_groups",
            "Replayed groups",
            INTERNALS,
            "",
            "The names of the groups that were learned again.",
            "hidden",
        ),
    )

    groups: Annotated[NonNegativeInt, _REWARDED] = 0
    """Groups of earlier steps that each step also learns from; drawn by the spread of their rewards."""
    size: Annotated[PositiveInt, _REPLAY] = 64
    """Number of groups kept for replay; the oldest are dropped."""
    priority: Annotated[NonNegativeFloat, _REPLAY] = 1.0
    """A group is drawn in proportion to the standard deviation of its rewards to this power. 0: all equally."""

    @classmethod
    def of(cls, settings: TrainingSettings) -> Replay | None:
        own = cls.given(settings)
        return own if own.groups else None

    def in_run(self, run: RunScope) -> RunHooks:
        return _Replaying(self, run)


class _Replaying(RunHooks):
    def __init__(self, part: Replay, run: RunScope) -> None:
        self._groups = part.groups
        self._run = run
        self._buffer = ReplayBuffer(part.size, part.priority, run.settings.seed)
        self._drawn: list[Episode] = []

    async def load(self, state: Sequence[Mapping[str, Any]]) -> None:
        await self._buffer.return_to(self._run.context.store, state, self._run.settings.reward_weights)

    def state(self) -> list[dict[str, Any]]:
        return self._buffer.state

    def again(self, step: int) -> list[Episode]:
        self._drawn = self._buffer.draw(self._groups, step)
        return self._drawn

    def learned(self, sampled: Sampled, again: Sequence[Episode]) -> dict[str, Any]:
        settings = self._run.settings
        rule = settings.credit_rule()
        teaching = groups_to_learn_from(sampled.episodes, rule, settings.adapters)
        self._buffer.add(sampled.episodes, teaching, rule)
        names = dict.fromkeys(str(e.rollout.metadata.get("group")) for e in self._drawn)
        return {"replayed": len(self._drawn), "replayed_groups": list(names)}
