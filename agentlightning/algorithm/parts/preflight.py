"""Preflight: training refuses to go on when there is nothing to learn from, and names the cause."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import NonNegativeInt

from agentlightning.algorithm.base import Objections, no_objections
from agentlightning.algorithm.credit.assignment import groups_to_learn_from
from agentlightning.algorithm.credit.units import CreditRule
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.part import Part, RunHooks, RunScope
from agentlightning.algorithm.records import flattened
from agentlightning.algorithm.rollout_verdicts import (
    calls_no_longer,
    most_fail,
    never_called,
    nothing_trained,
    unmatched_agents,
)
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.algorithm.verdicts import fallen, not_risen
from agentlightning.arguments import SettingsGroup
from agentlightning.errors import AgentError
from agentlightning.metrics import Reporter
from agentlightning.models import examples_first
from agentlightning.runner.frameworks import caches_on
from agentlightning.types.finding import Finding, counted

if TYPE_CHECKING:
    from agentlightning.algorithm.episode import Sampled

LOOK_AGAIN = 5
"""Steps between one look at whether the reward has risen and the next."""
LOOKS = 2
"""Steps whose rollouts are looked at as the doctor does."""
FLAT_STEPS = 5
"""Steps in a row without any difference between siblings that are worth a word."""
SOLVED_ROLLOUTS = 100
"""Rollouts in a row with the highest reward after which the tasks count as solved: a policy that fails one time in 33
or more has so many in a row with a probability below 0.05 (the rule of three)."""
_TOO_HARD = (
    "If it is always low, the tasks are too hard or the reward too strict: start with easier tasks or give partial "
    "rewards. If it is always high, the agent has nothing left to learn."
)

CLIPS_NOTHING = (
    "One update per step: all ratios are 1, so clipping plays no part, and losses that differ in it are the same. "
    "minibatches=2 or update_epochs=2 make it count."
)


class Preflight:
    """Looks at each step's rollouts before they are learned from, and at what came of it."""

    def __init__(
        self,
        reporter: Reporter,
        rule: CreditRule,
        *,
        policies: Collection[str] = (),
        learned: bool = False,
        compares: bool = True,
        flat_steps: int = FLAT_STEPS,
        refused_requests: Mapping[str, int] | None = None,
        selected_by: Mapping[str, str] | None = None,
        objections: Objections = no_objections,
        settings: Mapping[str, Any] | None = None,
        goes_on: bool = False,
    ) -> None:
        """
        rule: how rewards are handed out, and so what siblings must differ in.
        policies: the aliases of several policies.
        learned: siblings have differed before, in the part of the run that is being resumed.
        compares: the algorithm learns from how rollouts of a step differ.
        flat_steps: steps in a row without any difference after which a run that has never learned stops; 0: nothing
            that earns the same ends the run.
        refused_requests: what the gateway counts of requests that belonged to no attempt.
        selected_by: the settings that choose which calls are trained.
        objections: asked about the rollouts of the first steps, with `settings`.
        goes_on: what would be refused is reported instead, and the run goes on.
        """
        self._objections, self._settings = objections, settings or {}
        self._looks = 0 if learned else LOOKS
        self._seen: list[Episode] = []
        self._goes_on = goes_on
        self._selected_by = selected_by or {}
        self._flat_steps = flat_steps
        self._refused_requests = {} if refused_requests is None else refused_requests
        self._rule = rule
        self._policies = policies
        self._compares = compares
        self._reporter = reporter
        self._learned = self._was_called = learned
        self._flat = 0
        self._highest_in_a_row = 0
        self._failed = 0
        self._highest = -math.inf
        self._lowest = math.inf
        self.solved = False
        """After learning, all rollouts of `FLAT_STEPS` steps, `SOLVED_ROLLOUTS` or more, earned the highest reward."""
        self.stuck = False
        """There has been nothing to learn for a while, just now: what was learned by then should be saved."""
        self._reported: set[str] = set()
        self._rewards: list[float] = []

    def check(self, episodes: Sequence[Episode]) -> None:
        """Raises AgentError when no rollout of the step can be learned from; warns once about failures.

        In a run that has learned already, steps whose rollouts all failed are borne for a while: what they call may
        come back.
        """
        usable = [e for e in episodes if self._rule.uses[e.outcome] != "mask"]
        failed = [e for e in episodes if not e.good]
        self._failed = 0 if usable else self._failed + 1
        unanswered = not usable and all(e.refused and not e.calls for e in episodes)
        if unanswered:
            self._refuse(str(never_called(episodes, self._refused_requests)))
        elif not usable and (not self._learned or self._failed >= FLAT_STEPS):
            self._refuse(
                f"There is nothing to learn from in this step. {most_fail(failed, len(episodes))}\n"
                "Try the agent alone first:  agl doctor,  or  trainer.dev(agent, tasks)"
            )
        elif failed:
            found = most_fail(failed, len(episodes))
            self._tell(f"{found} They are left out of the update.", key=found.words.split(". ", 1)[-1])
        if not usable:
            return
        if not any(e.calls for e in usable):
            silent = self._was_called and not any(e.refused for e in usable)
            self._refuse(str(self._uncalled(episodes, silent=silent)))
        elif not any(e.sampled_tokens for e in usable):
            self._refuse(str(nothing_trained(usable, self._selected_by)))
        self._was_called = True
        if (nobody := unmatched_agents(usable, self._policies)) is not None:
            self._refuse(str(nobody))
        self._object(usable)
        if self._compares:
            self._check_variance(usable)

    def _uncalled(self, episodes: Sequence[Episode], *, silent: bool) -> Finding:
        caches = caches_on()
        return calls_no_longer(caches) if silent else never_called(episodes, self._refused_requests, caches)

    def watch(self, metrics: Mapping[str, Any]) -> None:
        """After a step: say once that the reward has fallen, or, with the likeliest cause, that it has not risen."""
        if not self._compares or metrics.get("reward") is None:
            return
        self._rewards.append(metrics["reward"])
        found = fallen(self._rewards, self._lowest, self._highest)
        if found is None and len(self._rewards) % LOOK_AGAIN == 0:
            found = not_risen(self._rewards, self._lowest, self._highest, metrics)
        if found is not None:
            self._tell(str(found), key=found.code, verdict=True)

    def _object(self, usable: Sequence[Episode]) -> None:
        """Say what speaks against the first rollouts there are; refuse to learn where it makes no sense.

        Those of the second step are looked at together with the first one's: what an agent keeps from one rollout to
        the next is not seen in rollouts that began at the same time.
        """
        if not self._looks:
            return
        self._looks -= 1
        self._seen += usable
        found = list(self._objections(self._seen, self._settings))
        if not self._looks:
            self._seen = []
        for objection in found:
            if objection.refuses:
                self._refuse(str(objection.finding), objection.finding.code)
            self._tell(str(objection.finding), key=objection.finding.code)

    def _refuse(self, text: str, key: str | None = None) -> None:
        """Raises AgentError; says it once where the user wants to go on all the same."""
        if not self._goes_on:
            raise AgentError(text)
        self._tell(f"{text} (preflight='warn': the run goes on.)", key=key)

    def _check_variance(self, usable: Sequence[Episode]) -> None:
        rewards = sorted({e.reward for e in usable if e.reward is not None})
        self._highest = max([self._highest, *rewards])
        self._lowest = min([self._lowest, *rewards])
        if groups_to_learn_from(usable, self._rule, self._policies):
            self._flat, self._highest_in_a_row, self.stuck, self._learned = 0, 0, False, True
            return
        at_the_top = rewards == [self._highest]
        self._flat += 1
        self._highest_in_a_row = self._highest_in_a_row + len(usable) if at_the_top else 0
        self.stuck = self._learned and self._flat == FLAT_STEPS
        if self._learned and self._flat >= FLAT_STEPS and self._highest_in_a_row >= SOLVED_ROLLOUTS:
            self.solved = self._flat_steps > 0
            end = "training ends here" if self.solved else "the run goes on all the same (flat_steps=0)"
            self._tell(
                f"The last {self._highest_in_a_row} rollouts all earned the highest reward seen ({self._highest:g}): "
                f"nothing is left to learn from these tasks, and {end}.",
                key="solved",
                verdict=True,
            )
        elif self.stuck and not at_the_top:
            text = f"{_same(self._flat, rewards)} The run goes on with its next tasks. {_TOO_HARD}"
            self._tell(text, verdict=True)
        elif not self._learned and self._flat_steps and self._flat >= self._flat_steps:
            advice = examples_first(self._settings.get("model")) if self._highest <= 0 else _TOO_HARD
            self._refuse(
                f"{_same(self._flat, rewards)} {advice} To let a run wait longer for its first success, set "
                "flat_steps (0: for ever)."
            )

    def _tell(self, text: str, key: str | None = None, *, verdict: bool = False) -> None:
        key = key or text.split(". ", 1)[-1]
        if key not in self._reported:
            self._reported.add(key)
            (self._reporter.verdict if verdict else self._reporter.warn)(text)


def _same(steps: int, rewards: Sequence[float]) -> str:
    shown = ", ".join(f"{r:g}" for r in rewards[:5])
    return (
        f"For {counted(steps, 'step')} all siblings earned the same reward ({shown}), so there was nothing "
        "to learn from."
    )


@dataclass(frozen=True, kw_only=True)
class Checks(SettingsGroup, Part):
    """Every run is looked at before it learns and after each step."""

    name = "preflight"

    mode: Literal["refuse", "warn"] = "refuse"
    """What to do if training would be meaningless (no calls, no tokens, no differing rewards): stop with the cause, or
    warn and continue."""
    flat_steps: NonNegativeInt = FLAT_STEPS
    """Stop a run that has never learned when all siblings have earned the same for this many steps. A run that has
    learned is saved and continues until its last 100 rollouts all earn the highest reward seen. 0: neither ends a
    run."""

    @classmethod
    def of(cls, settings: TrainingSettings) -> Checks:
        return cls.given(settings)

    def in_run(self, run: RunScope) -> RunHooks:
        settings, context = run.settings, run.context
        if settings.clips_nothing and settings.chooses("loss", "clip_low", "clip_high"):
            context.reporter.note(CLIPS_NOTHING)
        rollouts = min(settings.tasks_per_step, len(run.tasks)) * settings.group_size
        return _Looking(
            Preflight(
                context.reporter,
                settings.credit_rule(),
                policies=list(settings.adapters),
                learned=run.step > 0,
                compares=settings.samples and not settings.credit_mode.teacher and rollouts > 1,
                flat_steps=self.flat_steps,
                refused_requests=context.refused_requests,
                selected_by=context.selected_by,
                objections=context.objections,
                settings=flattened(settings, shown=False),
                goes_on=self.mode == "warn",
            )
        )


class _Looking(RunHooks):
    def __init__(self, preflight: Preflight) -> None:
        self._preflight = preflight

    def check(self, sampled: Sampled) -> None:
        self._preflight.check([*sampled.episodes, *sampled.dropped])

    def after_step(self, metrics: Mapping[str, Any]) -> None:
        self._preflight.watch(metrics)

    @property
    def ends_run(self) -> bool:
        return self._preflight.solved

    @property
    def needs_checkpoint(self) -> bool:
        return self._preflight.stuck
