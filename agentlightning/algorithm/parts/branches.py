"""Credit by branches: what a state in the middle of a rollout is worth, by rollouts that go on from it.

A continuation is a fork: its first calls are answered from the record of the rollout, so that the agent is in the same
state, and the rest is sampled. The mean of what m continuations earn estimates the value of the state, and a turn is
worth the value after it less the value before it (VinePPO, Kazemnejad et al., arXiv 2410.01679, section 4, for turns in
place of steps of reasoning; `modes.branches`). No critic is trained.

The gradient stays that of the reward, because a turn is chosen by a draw of its own, among the first of which no more
than `turns` are taken. Nothing that comes after a turn has a say, so the values that a call is compared with do not
depend on what the call did, and those that follow it are right on average. A choice among all turns of a finished
rollout, such as "the most uncertain ones", would not be so.

Continuations are trained, too, from where they go on (`credit.continuations`).

The values of a rollout's states and the names of its continuations stand in its metadata, so that they are there when
the run goes on after a kill.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import PositiveInt

from agentlightning.algorithm.credit.continuations import with_continuations
from agentlightning.algorithm.credit.units import known_states, state_values
from agentlightning.algorithm.episode import Episode, collect
from agentlightning.algorithm.part import Part, PolicyHooks, PolicyScope, RunHooks, RunScope, Update
from agentlightning.algorithm.parts.constraint import Constraints
from agentlightning.algorithm.parts.scales import Scales
from agentlightning.algorithm.records import value_of
from agentlightning.algorithm.sampling.going_on import (
    Continued,
    ContinuingHooks,
    by_state,
    go_on,
    states_of,
    turns_of,
    warn_of_shared_state,
)
from agentlightning.algorithm.settings import Share, TrainingSettings
from agentlightning.arguments import Needs, SettingsGroup
from agentlightning.errors import ConfigError
from agentlightning.learner.packing import CreditedCall
from agentlightning.litagent import LitAgent
from agentlightning.metrics.catalogue import REWARD, TOKENS, Metric
from agentlightning.types.arrays import np
from agentlightning.types.recording import FORK_OF, STATES

if TYPE_CHECKING:
    from agentlightning.algorithm.episode import Sampled

_BRANCHES = Needs(lambda s: s.credit_mode.branches, "credit='branches'")


@dataclass(frozen=True, kw_only=True)
class Branches(SettingsGroup, Part):
    """How states are valued: `GRPO(…, credit="branches", branches=agl.Branches(continuations=8))`."""

    name = "branches"

    metrics = (
        Metric(
            "branches/states",
            "States valued",
            REWARD,
            "states",
            "Intermediate states of the step's rollouts whose value was measured by continuations.",
        ),
        Metric("branches/forks", "Continuations", REWARD, "rollouts", "Rollouts that continued from such states."),
        Metric(
            "branches/lost",
            "Continuations lost",
            REWARD,
            "rollouts",
            "Continuations that failed, or whose requests differed from the original rollout's.",
        ),
        Metric("branches/tokens", "Tokens of continuations", TOKENS, "tokens", "The tokens sampled by continuations."),
    )

    continuations: Annotated[PositiveInt, _BRANCHES] = 4
    """Rollouts that continue from each valued state. One or two give too uncertain a mean."""
    share: Annotated[Share, _BRANCHES] = 0.5
    """Probability that the state before a turn is valued. The siblings already value the state before the first
    turn."""
    turns: Annotated[PositiveInt, _BRANCHES] = 2
    """Maximum number of valued states in a rollout."""
    train: Annotated[bool, _BRANCHES] = True
    """Whether to train on the continuations, too."""

    @classmethod
    def of(cls, settings: TrainingSettings) -> Branches | None:
        return cls.given(settings) if settings.credit_mode.branches else None

    @classmethod
    def check(cls, settings: TrainingSettings) -> None:
        if not settings.credit_mode.branches:
            return
        estimator = settings.estimator
        if not estimator.siblings or estimator.selects or estimator.whitens or estimator.decoupled:
            raise ConfigError(
                f"credit='branches' compares the value of a state with siblings, for which advantage="
                f"{settings.advantage!r} is not made; take 'rloo', 'drgrpo' or 'grpo'."
            )
        others = {
            "an algorithm that samples nothing": settings.is_supervised or not settings.samples,
            "group_judge": value_of(settings, "group_judge") is not None,
            "constraint": bool(Constraints.parts_in(settings)),
            "several policies": len(settings.adapters) > 1,
            "kl_in='reward'": settings.kl_coef != 0 and settings.kl_in == "reward",
            "overlong_tokens": settings.overlong_tokens is not None,
            "reward_scale": Scales.of(settings) is not None,
        }
        if found := [what for what, given in others.items() if given]:
            raise ConfigError(
                f"credit='branches' does not go together with {' and '.join(found)}: rollouts and their continuations "
                "have to earn their rewards in the same way. Leave it out, or take another credit."
            )

    def check_agent(self, settings: TrainingSettings, agent: LitAgent[Any]) -> None:
        warn_of_shared_state(agent, "credit='branches'")

    def in_run(self, run: RunScope) -> RunHooks:
        return _Branching(self, run)

    def in_policy(self, policy: PolicyScope) -> PolicyHooks:
        return _KnownStates()


class _Branching(ContinuingHooks):
    def __init__(self, part: Branches, run: RunScope) -> None:
        super().__init__()
        self._part = part
        self._run = run
        self._store = run.context.store
        self._warned = False

    async def finished(self, groups: Sequence[Sequence[str]]) -> None:
        settings, context = self._run.settings, self._run.context
        read = await collect(self._store, [i for group in groups for i in group], settings.reward_weights)
        found = {e.rollout.rollout_id: e for e in read}
        new = [
            (found[rollout_id], number)
            for group in groups
            for number, rollout_id in enumerate(group)
            if rollout_id in found and not known_states(found[rollout_id].rollout)
        ]
        states = [s for e, number in new for s in await states_of(context, e, self._chosen(e, number))]
        step = new[0][0].rollout.metadata["step"] if new else 0
        continued = await go_on(context, settings, states, self._part.continuations, step)
        for episode, _ in new:
            own = [(s.at, c) for s, c in zip(states, continued, strict=True) if s.episode is episode]
            await self._keep(episode, own)
        for name in found.keys() - self._going_on.keys():  # valued before the run was interrupted
            ids = known_states(found[name].rollout).get("trained", [])
            self._going_on[name] = await collect(self._store, ids, settings.reward_weights) if ids else []

    def _chosen(self, episode: Episode, number: int) -> list[int]:
        """Before which calls of a rollout, the `number`-th of its siblings, states are valued."""
        part, about, settings = self._part, episode.rollout.metadata, self._run.settings
        if settings.credit_rule().uses[episode.outcome] != "train":
            return []
        random = np.random.default_rng([settings.seed, about["step"], zlib.crc32(str(about["group"]).encode()), number])
        return [n for n in turns_of(episode)[1:] if random.random() < part.share][: part.turns]

    async def _keep(self, episode: Episode, continued: Sequence[tuple[int, Continued]]) -> None:
        """Write down what states are worth, by the call before which each was."""
        name = episode.rollout.rollout_id
        trained = [e for _, one in continued for e in one.good] if self._part.train else []
        about = {
            "of": name,
            "values": {episode.calls[at].info.call_id: fmean(one.earned) for at, one in continued if one.earned},
            "forks": sum(len(one.all) for _, one in continued),
            "lost": sum(len(one.all) - len(one.good) for _, one in continued),
            "tokens": sum(one.tokens for _, one in continued),
            "trained": [e.rollout.rollout_id for e in trained],
        }
        await self._store.update_rollout(name, metadata={**episode.rollout.metadata, STATES: about})
        self._going_on[name] = trained

    def measure(self, sampled: Sampled) -> dict[str, Any]:
        known = [about for e in (*sampled.episodes, *sampled.dropped) if (about := known_states(e.rollout))]
        forks, lost = (sum(about[name] for about in known) for name in ("forks", "lost"))
        if forks and lost * 2 > forks and not self._warned:
            self._warned = True
            self._run.context.reporter.warn(
                f"{lost} of {forks} continuations failed, or their agent asked something else than in the rollout that "
                "they go on from, so that they say nothing of its states. Agents that use clocks or random numbers, or "
                "whose tools answer otherwise each time, need another credit than 'branches'."
            )
        return {
            "branches/states": sum(len(about["values"]) for about in known),
            "branches/forks": forks,
            "branches/lost": lost,
            "branches/tokens": sum(about["tokens"] for about in known),
        }


class _KnownStates(PolicyHooks):
    """What is known of states is what calls are compared with; continuations are trained beside their rollouts."""

    def __init__(self) -> None:
        self._going_on: dict[str, dict[int, list[Episode]]] = {}
        self._keep_flat = False

    async def before_credit(self, update: Update) -> None:
        self._going_on = by_state(update.episodes)
        update.episodes = [e for e in update.episodes if FORK_OF not in e.rollout.metadata]
        update.values |= state_values(update.episodes)
        self._keep_flat = update.rule.keep_flat
        if self._going_on:  # a rollout without advantage says where those that go on from it belong
            update.rule = replace(update.rule, keep_flat=True)

    async def after_credit(self, update: Update) -> None:
        if not self._going_on:
            return
        update.rule = replace(update.rule, keep_flat=self._keep_flat)
        batches = with_continuations(update.batches, update.episodes, update.rule, self._going_on)
        update.batches = batches if self._keep_flat else [_teaching(batch) for batch in batches]


def _teaching(batch: Sequence[CreditedCall]) -> list[CreditedCall]:
    """Without conversations of which no call has an advantage: they have no gradient."""
    teaches = {c.sequence for c in batch if c.advantages.any()}
    return [c for c in batch if c.sequence in teaches]
