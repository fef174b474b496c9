"""Episodes: finished rollouts with what was sampled in them and what they earned, as an algorithm reads them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from agentlightning.algorithm.given import calls_as_given, given_triplets
from agentlightning.store.base import LightningStore
from agentlightning.types import Attempt, Call, Outcome, Rollout, Span
from agentlightning.types.names import REWARD_AGENT, REWARD_RESPONSE
from agentlightning.types.reward import PRIMARY, find_reward_spans, get_reward_value, get_rewards, reward_error

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Earned:
    """One reward of a rollout."""

    value: float
    call: int | None = None
    """Index of the call that earned it: the one it names, else the last one before it; None if there was none."""
    agent: str | None = None
    """The agent that gets the reward, if agents have rewards of their own; None: all agents."""
    named: bool = False
    """Whether it says itself which call it is for; such a reward is an intermediate one."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What it was given as, where that was more than a number: its parts by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One finished rollout: its last attempt, the rewards of that attempt, and its calls in order."""

    rollout: Rollout
    attempt: Attempt | None
    reward: float | None
    """The final reward: the last one that is everybody's; where there are only agents' own, the mean of their last, of
    agents whose calls are trained. One that was truncated before it earned anything has 0."""
    calls: Sequence[Call]
    rewards: Sequence[Earned] = ()
    """All of them, in order."""
    separate: bool = False
    """Whether each call has its own reward and none but that: the agent returned triplets."""
    refused: Sequence[str] = ()
    """Why requests to the model were refused before anything was sampled, one text each."""
    replayed: bool = False
    """Whether it is learned again, from an earlier step: what it earned is no news."""

    @property
    def outcome(self) -> Outcome:
        """A rollout without an outcome was never run: that is the system's failure."""
        return (self.attempt and self.attempt.outcome) or Outcome.INFRA_ERROR

    @property
    def good(self) -> bool:
        """Whether the rollout ended without a failure; a truncated one counts as good."""
        return self.outcome in (Outcome.OK, Outcome.TRUNCATED)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy in training sampled."""
        return sum(len(c.response_ids) for c in self.calls if c.info.trained)


async def collect(
    store: LightningStore, rollout_ids: Sequence[str], reward_weights: Mapping[str, float] | None = None
) -> list[Episode]:
    """Read finished rollouts back from the store, in the order of `rollout_ids`; one read, however many they are.

    A reward of several named parts is its primary part, or, with `reward_weights`, the weighted sum of those of its
    parts that have a weight.
    """
    found = await store.query_records(rollout_ids)
    return [make_episode(one.rollout, one.attempt, one.calls, one.spans, reward_weights) for one in found]


def make_episode(
    rollout: Rollout,
    attempt: Attempt | None,
    calls: Sequence[Call],
    spans: Sequence[Span],
    reward_weights: Mapping[str, float] | None = None,
) -> Episode:
    """Put a rollout's calls and the rewards among its spans together; `reward_weights` as in `collect`."""
    if given := given_triplets(spans):
        calls, which = calls_as_given(calls, given)
        pairs = [(t.reward, i) for (_, t), i in zip(given, which, strict=True)]
        own = [Earned(reward, i, named=True) for reward, i in pairs if reward is not None]
        return Episode(rollout, attempt, _final(own), calls, own, separate=True)
    for span in spans:
        if (wrong := reward_error(span.name, span.attributes)) is not None:
            logger.warning("A reward of rollout %s is left out. %s", span.rollout_id, wrong)
    rewards = [_earned(span, calls, reward_weights or {}) for span in find_reward_spans(spans)]
    final = _final(rewards, calls)
    if final is None and attempt is not None and attempt.outcome is Outcome.TRUNCATED:
        final = 0.0
    refused = [s.status.description or "" for s in spans if s.attributes.get("error.type") == "refused"]
    return Episode(rollout, attempt, final, calls, rewards, refused=refused)


def _earned(span: Span, calls: Sequence[Call], weights: Mapping[str, float]) -> Earned:
    value = get_reward_value(span)
    assert value is not None, span
    parts = get_rewards(span)
    if weights.keys() & parts.keys():
        value = sum(weights.get(name, 0.0) * part for name, part in parts.items())
    named = span.attributes.get(REWARD_RESPONSE)
    found = [
        i
        for i, call in enumerate(calls)
        if (call.info.response_id == named if named else call.info.start_time <= (span.start_time or 0.0))
    ]
    return Earned(
        value, found[-1] if found else None, span.attributes.get(REWARD_AGENT), named is not None, _named(parts)
    )


def _named(parts: Mapping[str, float]) -> Mapping[str, float]:
    """A number that was given without a name has no parts."""
    return {} if list(parts) == [PRIMARY] else parts


def _final(rewards: Sequence[Earned], calls: Sequence[Call] = ()) -> float | None:
    common = [r for r in rewards if r.agent is None]
    if common:
        return ([r for r in common if not r.named] or common)[-1].value
    last = {r.agent: r.value for r in of_trained(rewards, calls)}
    return sum(last.values()) / len(last) if last else None


def of_trained(rewards: Sequence[Earned], calls: Sequence[Call]) -> Sequence[Earned]:
    """The rewards of agents that are trained, and everybody's. Where no such agent is rewarded: all but those of agents
    that called a model and are not trained; and all, where nothing else is there.
    """
    trained = {c.info.agent for c in calls if c.info.trained}
    others = {c.info.agent for c in calls} - trained
    if any(r.agent is not None and r.agent in trained for r in rewards):
        return [r for r in rewards if r.agent is None or r.agent in trained]
    return [r for r in rewards if r.agent not in others] or rewards


def mean_reward(episodes: Sequence[Episode]) -> float | None:
    """The mean reward of the episodes that have one; None if none has."""
    rewards = [e.reward for e in episodes if e.reward is not None]
    return fmean(rewards) if rewards else None
