"""Rare successes: going on from the states shortly before the end of the few good rollouts of a task.

Where one sibling of eight succeeds, what it did at last is seen once. Here several rollouts go on from where it was
then, and are learned from as siblings of their own: from a state near the goal success is likelier, so there is more to
learn from, and what is learned there makes earlier states worth more (starts near the goal: Salimans and Chen, arXiv
1812.03381; first return, then explore: Ecoffet et al., arXiv 2004.12919).

What is ascended is J + Σ_s d(s) V(s): the expected reward, and the value of the states s that are gone on from, each
with the weight of one rollout. d is the distribution of these states, which lie before successes, and no gradient goes
through it. The gradient of each V(s) is unbiased: continuations are compared with each other alone, because the rollout
that they go on from was chosen for its success. They are sampled by the policy itself, so their importance weights are
those of any rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge
from pydantic import PositiveInt

from agentlightning.algorithm.credit.continuations import with_continuations
from agentlightning.algorithm.episode import Episode, collect
from agentlightning.algorithm.part import Part, PolicyHooks, PolicyScope, RunHooks, RunScope, Update
from agentlightning.algorithm.records import value_of
from agentlightning.algorithm.sampling.going_on import (
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
from agentlightning.litagent import LitAgent
from agentlightning.metrics.catalogue import REWARD, TOKENS, Metric
from agentlightning.types.recording import EXPLORED, FORK_OF

if TYPE_CHECKING:
    from agentlightning.algorithm.episode import Sampled

_EXPLORES = Needs(lambda s: s.explore.how != "none", "explore='fork_successes'")


@dataclass(frozen=True, kw_only=True)
class Explore(SettingsGroup, Part):
    """Whether rare successes are gone on from: `GRPO(…, explore=agl.Explore(how="fork_successes", below=0.5))`."""

    name = "explore"

    metrics = (
        Metric(
            "explore/states",
            "Successes continued",
            REWARD,
            "states",
            "With `explore`: states near the end of rare successes from which other rollouts continued.",
        ),
        Metric(
            "explore/forks", "Rollouts from successes", REWARD, "rollouts", "Rollouts that continued from such states."
        ),
        Metric(
            "explore/lost",
            "Rollouts from successes lost",
            REWARD,
            "rollouts",
            "Continuations that failed, or whose requests differed from the original rollout's.",
        ),
        Metric("explore/tokens", "Tokens from successes", TOKENS, "tokens", "The tokens sampled by such rollouts."),
        Metric(
            "explore/reward",
            "Reward from successes",
            REWARD,
            "reward",
            "The mean reward of rollouts that continued from such states.",
        ),
    )

    how: Literal["none", "fork_successes"] = "none"
    """`fork_successes`: if few rollouts of a task succeed, further rollouts continue from states shortly before the end
    of those."""
    below: Annotated[Share, _EXPLORES] = 0.25
    """Largest share of best rollouts of a task that still counts as few."""
    continuations: Annotated[int, Ge(2), _EXPLORES] = 4
    """Rollouts that continue from each such state; at least two, because they are compared with each other."""
    back: Annotated[PositiveInt, _EXPLORES] = 1
    """How many turns before the end of a good rollout they start."""

    @classmethod
    def of(cls, settings: TrainingSettings) -> Explore | None:
        own = cls.given(settings)
        return own if own.how != "none" else None

    @classmethod
    def check(cls, settings: TrainingSettings) -> None:
        if cls.of(settings) is None:
            return
        estimator, mode = settings.estimator, settings.credit_mode
        others = {
            "an algorithm that samples nothing": settings.is_supervised or not settings.samples,
            f"credit={settings.credit!r}": mode.critic or mode.teacher or mode.branches,
            f"advantage={settings.advantage!r}": not estimator.siblings
            or estimator.selects
            or estimator.whitens
            or estimator.decoupled,
            "group_judge": value_of(settings, "group_judge") is not None,
            "several policies": len(settings.adapters) > 1,
        }
        if found := [what for what, given in others.items() if given]:
            raise ConfigError(
                f"explore='fork_successes' does not go together with {' and '.join(found)}: those that go on from a "
                "state are compared with each other by what they earned. Leave it out, or take advantage='grpo', "
                "'drgrpo' or 'rloo' with credit='broadcast'."
            )

    def check_agent(self, settings: TrainingSettings, agent: LitAgent[Any]) -> None:
        warn_of_shared_state(agent, "explore='fork_successes'")

    def in_run(self, run: RunScope) -> RunHooks:
        return _Exploring(self, run)

    def in_policy(self, policy: PolicyScope) -> PolicyHooks:
        return _LearningFromStates()


class _Exploring(ContinuingHooks):
    def __init__(self, part: Explore, run: RunScope) -> None:
        super().__init__()
        self._part = part
        self._run = run

    async def finished(self, groups: Sequence[Sequence[str]]) -> None:
        settings, context = self._run.settings, self._run.context
        read = await collect(context.store, [i for group in groups for i in group], settings.reward_weights)
        found = {e.rollout.rollout_id: e for e in read}
        chosen = [e for group in groups for e in self._few([found[i] for i in group if i in found])]
        new = [e for e in chosen if not _explored(e)]
        states = [s for e in new for s in await states_of(context, e, turns_of(e)[-self._part.back :][:1])]
        step = new[0].rollout.metadata["step"] if new else 0
        continued = await go_on(context, settings, states, self._part.continuations, step)
        for state, one in zip(states, continued, strict=True):
            name = state.episode.rollout.rollout_id
            about = {"of": name, "forks": len(one.all), "lost": len(one.all) - len(one.good), "tokens": one.tokens}
            about |= {"earned": fmean(one.earned) if one.earned else None}
            about |= {"trained": [e.rollout.rollout_id for e in one.good]}
            await context.store.update_rollout(name, metadata={**state.episode.rollout.metadata, EXPLORED: about})
            self._going_on[name] = one.good
        for episode in chosen:  # explored before the run was interrupted
            ids = _explored(episode).get("trained", [])
            if ids:
                again = await collect(context.store, ids, settings.reward_weights)
                self._going_on[episode.rollout.rollout_id] = again

    def _few(self, siblings: Sequence[Episode]) -> list[Episode]:
        """The good rollouts of a task where they are few, that have a state to go on from other than their first."""
        counted = [e for e in siblings if self._run.settings.credit_rule().uses[e.outcome] == "train"]
        earned = [e.reward for e in counted if e.reward is not None]
        if not earned or min(earned) == max(earned):
            return []
        good = [e for e in counted if e.reward == max(earned)]
        few = len(good) <= self._part.below * len(siblings)
        return [e for e in good if len(turns_of(e)) > self._part.back] if few else []

    def measure(self, sampled: Sampled) -> dict[str, Any]:
        known = [about for e in (*sampled.episodes, *sampled.dropped) if (about := _explored(e))]
        earned = [about["earned"] for about in known if about["earned"] is not None]
        return {
            "explore/states": len(known),
            "explore/forks": sum(about["forks"] for about in known),
            "explore/lost": sum(about["lost"] for about in known),
            "explore/tokens": sum(about["tokens"] for about in known),
            **({"explore/reward": fmean(earned)} if earned else {}),
        }


class _LearningFromStates(PolicyHooks):
    def __init__(self) -> None:
        self._going_on: dict[str, dict[int, list[Episode]]] = {}

    async def before_credit(self, update: Update) -> None:
        found = by_state(update.episodes)
        self._going_on = {name: {at: e for at, e in of.items() if len(e) > 1} for name, of in found.items()}
        update.episodes = [e for e in update.episodes if FORK_OF not in e.rollout.metadata]

    async def after_credit(self, update: Update) -> None:
        if self._going_on:
            update.batches = with_continuations(
                update.batches, update.episodes, update.rule, self._going_on, with_their_rollout=False
            )


def _explored(episode: Episode) -> dict[str, Any]:
    """What is known of those that went on from one of a rollout's states; nothing for another's, whose
    metadata a sibling that is enqueued later shares."""
    about = episode.rollout.metadata.get(EXPLORED) or {}
    return about if about.get("of") == episode.rollout.rollout_id else {}
