"""The cheap part of the doctor inside of `fit`: what the first steps' rollouts say, before they are learned from.

It looks at records that the step has read anyway. What it is not: the checks of every step, which are the algorithm's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentlightning.algorithm.base import Objection
from agentlightning.algorithm.episode import Episode
from agentlightning.doctor.evidence import Evidence
from agentlightning.doctor.in_rollouts import rollout_findings
from agentlightning.doctor.in_texts import text_findings
from agentlightning.runner.frameworks import caches_on

MEANINGLESS = frozenset(
    {"token_ids_missing", "nothing_trained", "never_called", "calls_refused", "calls_not_captured", "greedy_sampling"}
)
"""Findings with which nothing can be learned, whatever comes later."""
OF_ALL = frozenset({"prompts_too_long", "no_reward", "reward_not_finite"})
"""The same, if they are of all rollouts."""
_WATCHED_OVER_STEPS = frozenset(
    {"rollouts_fail", "rewards_reach_nobody", "nothing_ran", "too_easy", "too_hard", "no_variance", "constant_reward"}
)
"""Watched by the algorithm over several steps, which may have a rare success."""


def objections(episodes: Sequence[Episode], settings: Mapping[str, Any]) -> Iterator[Objection]:
    """What speaks against learning from a step's rollouts, and whether it makes training meaningless."""
    evidence = Evidence(episodes=episodes, settings=settings, caches=caches_on())
    for finding in (*rollout_findings(evidence), *text_findings(evidence)):
        if finding.code not in _WATCHED_OVER_STEPS and finding.severity != "note":
            of_all = finding.code in OF_ALL and finding.evidence["affected"] == len(episodes)
            yield Objection(finding, refuses=finding.code in MEANINGLESS or of_all)
