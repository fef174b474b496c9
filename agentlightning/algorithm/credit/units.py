"""Units: what is compared with siblings, with the rewards and the calls that are its own. Pure.

A unit is a rollout; where agents have rewards of their own, one agent's part in it; one triplet, if an agent gave some.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agentlightning.algorithm.credit.advantage import Compute, Estimator, as_estimator
from agentlightning.algorithm.credit.ratios import overlong_penalty
from agentlightning.algorithm.episode import Earned, Episode
from agentlightning.types import Outcome, Rollout
from agentlightning.types.arrays import Float32Array, Int32Array, np
from agentlightning.types.call import Call
from agentlightning.types.recording import STATES
from agentlightning.types.reward import which_count

Use = Literal["train", "zero", "mask"]
Normalization = Literal["token", "sequence", "rollout", "sum", "constant"]

OUTCOME_USE: Mapping[Outcome, Use] = {
    Outcome.OK: "train",
    Outcome.TRUNCATED: "train",
    Outcome.AGENT_ERROR: "mask",
    Outcome.INFRA_ERROR: "mask",
    Outcome.JUDGE_ERROR: "mask",
    Outcome.TIMEOUT: "mask",
    Outcome.CANCELLED: "mask",
}
"""What a rollout that ended so is to the update: trained with its reward, trained with reward 0, or left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRule:
    """How rewards become advantages and weights."""

    mode: str = "broadcast"
    """A key of `credit.modes.CREDIT_MODES`."""
    advantage: str | Compute | Estimator = "grpo"
    """See `credit.advantage`; a mode with a critic has its own."""
    gamma: float = 1.0
    lam: float = 1.0
    total: bool = False
    """Whether `broadcast` gives the sum of a rollout's rewards instead of the last one."""
    normalization: Normalization = "token"
    constant: float | None = None
    overlong: tuple[int, int] | None = None
    """Sampled tokens from which a rollout earns 1 less, and over how many tokens before it the penalty rises."""
    keep_flat: bool = False
    """Keep rollouts without advantage: they have no policy gradient, but count for KL, entropy and a critic."""
    uses: Mapping[Outcome, Use] = field(default_factory=lambda: OUTCOME_USE)
    rewardless: bool = False
    """Rollouts count without a reward too."""
    by_call: bool = False
    """The calls of one rollout are compared with each other, instead of the rollouts of a task."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of a reward's parts by name, for an advantage that compares each of them by itself."""
    constrained: Sequence[str] = ()
    """Parts that have a constraint: siblings that differ in one of them differ."""

    @property
    def estimator(self) -> Estimator:
        """How units are compared."""
        return as_estimator(self.advantage)


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """What is compared with its siblings: a rollout, or one agent's part in it. T calls that are trained."""

    rollout: int
    """Index of the episode."""
    group: tuple[Hashable, str | None]
    """The group of siblings, and the agent if agents have rewards of their own."""
    counts: bool
    """False: masked."""
    total: float
    """What it earned altogether, as `broadcast` sees it."""
    rewards_T: Sequence[float]
    calls: Sequence[Call]
    shared: float = 0.0
    """What it earned apart from rewards that name a call …"""
    own_T: Sequence[float] = ()
    """… and what was given to calls by name, with their bonuses."""


def make_units(episodes: Sequence[Episode], rule: CreditRule, bonuses: Mapping[str, float]) -> list[Unit]:
    """One per rollout; where agents have rewards of their own, one per agent; one per call, if it is compared."""
    units: list[Unit] = []
    for r, e in enumerate(episodes):
        use = rule.uses[e.outcome]
        group = e.rollout.group
        if e.separate or rule.by_call:
            parts = [(_alone(e, i), [(i, c)]) for i, c in enumerate(e.calls) if c.info.trained and len(c.response_ids)]
            key = (e.rollout.rollout_id if rule.by_call else group, None)
            units += [_unit(r, part, use, key, calls, rule, bonuses) for part, calls in parts]
            continue
        agents = {c.info.agent for c in e.calls} if any(x.agent for x in e.rewards) else {None}
        for agent in sorted(agents, key=str):
            calls = [(i, c) for i, c in enumerate(e.calls) if len(agents) == 1 or c.info.agent == agent]
            trained = [(i, c) for i, c in calls if c.info.trained and len(c.response_ids)]
            units.append(_unit(r, e, use, (group, agent), trained, rule, bonuses))
    return units


def _alone(episode: Episode, call: int) -> Episode:
    """The episode as if this call and its own reward were all of it; what names no call counts for each of them."""
    named = [replace(x, agent=None) for x in episode.rewards if x.call == call and x.named]
    if named or episode.separate:
        return replace(episode, reward=None, rewards=named)
    earned = episode.earned_by(episode.calls[call].info.agent)
    return replace(episode, reward=earned, rewards=[] if earned is None else [Earned(earned, call)])


def _unit(
    r: int,
    episode: Episode,
    use: Use,
    key: tuple[Any, str | None],
    calls: Sequence[tuple[int, Call]],
    rule: CreditRule,
    bonuses: Mapping[str, float],
) -> Unit:
    agent = key[1]
    given = episode.rewards
    if not given and episode.reward is not None:
        given = [Earned(episode.reward, len(episode.calls) - 1)]
    earned = [x for x in given if x.agent is None or x.agent == agent] if use == "train" else []
    rewards_T = [bonuses.get(c.info.call_id, 0.0) for _, c in calls]
    own_T = list(rewards_T)
    for x in earned:
        before = [t for t, (i, _) in enumerate(calls) if x.call is not None and i <= x.call]
        if before:
            rewards_T[before[-1]] += x.value
        if before and x.named and calls[before[-1]][0] == x.call:
            own_T[before[-1]] += x.value
    final = episode.earned_by(agent) if use == "train" else None
    if rule.total and earned:
        final = sum(x.value for x in earned)
    shaped = _overlong(calls, rule)
    if rewards_T:
        rewards_T[-1] += shaped
    return Unit(
        rollout=r,
        group=key,
        counts=use == "zero" or (use == "train" and (final is not None or rule.rewardless)),
        total=(final or 0.0) + sum(bonuses.get(c.info.call_id, 0.0) for _, c in calls) + shaped,
        rewards_T=rewards_T,
        calls=[c for _, c in calls],
        shared=_unnamed(earned, agent, rule) + shaped,
        own_T=own_T,
    )


def _unnamed(earned: Sequence[Earned], agent: str | None, rule: CreditRule) -> float:
    """Of the rewards that name no call: the one that counts for the agent, or with `total` their sum."""
    unnamed = [x for x in earned if not x.named]
    return sum(x.value for x in (unnamed if rule.total else which_count(unnamed, agents=(agent,))))


def _overlong(calls: Sequence[tuple[int, Call]], rule: CreditRule) -> float:
    if rule.overlong is None:
        return 0.0
    tokens = np.array([sum(len(c.response_ids) for _, c in calls)], dtype=np.int32)
    return float(overlong_penalty(tokens, *rule.overlong)[0])


def known_states(rollout: Rollout) -> Mapping[str, Any]:
    """What continuations said of a rollout's states: the `values` by the id of the call before which each was there,
    and how many `forks` were made, of which so many were `lost`, and `tokens` sampled for it. Nothing for another's,
    whose metadata a sibling that is enqueued later shares."""
    about = rollout.metadata.get(STATES) or {}
    return about if about.get("of") == rollout.rollout_id else {}


def state_values(episodes: Sequence[Episode]) -> dict[str, Float32Array]:
    """The known values by call, as `modes.Values` has them."""
    return {
        call.info.call_id: np.full(len(call.response_ids), values[call.info.call_id], dtype=np.float32)
        for episode in episodes
        if (values := known_states(episode.rollout).get("values"))
        for call in episode.calls
        if call.info.call_id in values
    }


def group_numbers(episodes: Sequence[Episode]) -> Int32Array:
    """The group of each rollout as a number; siblings carry the same `group` in their metadata."""
    return numbers([e.rollout.group for e in episodes])


def numbers(keys: Sequence[Hashable]) -> Int32Array:
    """A number for each key, the same for equal keys, counted from 0 in the order of their first appearance."""
    found: dict[Hashable, int] = {}
    return np.array([found.setdefault(key, len(found)) for key in keys], dtype=np.int32)
