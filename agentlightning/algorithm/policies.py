"""Several policies in one run: each learns from its own calls and its own rewards, with a learner of its own.

A rollout is seen through the eyes of each policy (`seen_by`); everything else is done for each of them as for one that
is alone.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentlightning.algorithm.credit import groups_that_differ
from agentlightning.algorithm.episode import Episode, mean_reward
from agentlightning.algorithm.units import CreditRule
from agentlightning.algorithm.update import Updater
from agentlightning.metrics import Reporter
from agentlightning.types import Call


def seen_by(policy: str, episode: Episode) -> Episode:
    """The rollout as one policy learns from it: the calls of others are not trained, the rewards of others not its own.

    A reward is the policy's if it names nobody, the policy, or the agent that made one of its calls. A call whose agent
    has no name counts as made by an agent of the policy's name.
    """
    by_name = any(reward.agent == policy for reward in episode.rewards)
    calls = [_seen(call, policy, by_name) for call in episode.calls]
    agents = {call.info.agent for call in calls if call.info.policy == policy}
    return replace(episode, calls=calls, reward=episode.reward if episode.separate else episode.earned_by(*agents))


def _seen(call: Call, policy: str, by_name: bool) -> Call:
    info = call.info
    if info.policy != policy:
        return replace(call, info=replace(info, trained=False))
    return replace(call, info=replace(info, agent=policy if by_name else info.agent or policy))


def groups_to_learn_from(episodes: Sequence[Episode], rule: CreditRule, policies: Collection[str]) -> set[Hashable]:
    """The groups that teach anything: their siblings differ to one of the policies (to the one there is, if none)."""
    if not policies:
        return groups_that_differ(episodes, rule)
    return set().union(*(groups_that_differ([seen_by(p, e) for e in episodes], rule) for p in policies))


class PolicyUpdaters:
    """An updater per policy. Metrics carry the policy's name in front: `solver/loss`."""

    def __init__(self, updaters: Mapping[str, Updater], reporter: Reporter) -> None:
        self._updaters = updaters
        self._reporter = reporter
        self._told: set[str] = set()

    async def learn(
        self, episodes: Sequence[Episode], rate: float, *, check_packing: bool, measure_noise: bool = False
    ) -> dict[str, Any]:
        """Learn one step with each policy, one after the other."""
        metrics: dict[str, Any] = {}
        for name, updater in self._updaters.items():
            # A rollout that got on without the policy says nothing of it, not even as what others are compared with.
            own = [one for one in (seen_by(name, e) for e in episodes) if any(c.info.trained for c in one.calls)]
            if not own:
                self._tell_unused(name)
            fresh = [e for e in own if not e.replayed]
            tokens = sum(e.sampled_tokens for e in fresh)
            found = {"reward": mean_reward(fresh), "rollouts": len(fresh), "tokens": tokens}
            found |= await updater.learn(own, rate, check_packing=check_packing, measure_noise=measure_noise)
            metrics |= {f"{name}/{key}": value for key, value in found.items()}
        return metrics

    def _tell_unused(self, policy: str) -> None:
        if policy not in self._told:
            self._told.add(policy)
            self._reporter.warn(
                f"No rollout of this step asked for the policy '{policy}', so it learns nothing. An agent names it as "
                f"its model: model='{policy}'."
            )
