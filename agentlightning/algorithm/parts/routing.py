"""Routing replay: in a mixture of experts all updates of a step send a token through the experts chosen before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from agentlightning.algorithm.part import Part, PolicyHooks, PolicyScope, Update
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.errors import ConfigError
from agentlightning.learner.base import KeepsRoutes
from agentlightning.metrics.catalogue import ENGINE, Metric


@dataclass(frozen=True, kw_only=True)
class ReplayedRouting(Part):
    """Present where a mixture of experts replays its routing."""

    name = "routing"

    metrics = (
        Metric(
            "rerouted",
            "Experts that would differ",
            ENGINE,
            "share",
            "With `routing_replay`: the share of replayed choices for which the current weights would choose other "
            "experts.",
        ),
    )

    @classmethod
    def of(cls, settings: TrainingSettings) -> Self | None:
        return cls() if settings.routing_replay else None

    def in_policy(self, policy: PolicyScope) -> PolicyHooks:
        if not isinstance(policy.learner, KeepsRoutes):
            raise ConfigError("This backend cannot replay the routing of experts. Leave routing_replay out.")
        return _Routes(policy.learner)


class _Routes(PolicyHooks):
    def __init__(self, learner: KeepsRoutes) -> None:
        self._learner = learner

    async def packed(self, update: Update) -> None:
        await self._learner.keep_routes([batch for minibatch in update.minibatches for batch in minibatch.passes])
