"""Several policies in one run: each learns from its own calls and its own rewards, with a learner of its own.

A rollout is seen through the eyes of each policy (`seen_by`); everything else is done for each of them as for one that
is alone.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace

from agentlightning.algorithm.credit import groups_that_differ
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.units import CreditRule
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
