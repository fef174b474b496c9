"""Preflight: training refuses to go on when there is nothing to learn from, and names the cause."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from agentlightning.algorithm.base import Objections, no_objections
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.policies import groups_to_learn_from
from agentlightning.algorithm.trend import (
    FALSE_ALARMS,
    MISSED_RISES,
    chance_of_no_rise,
    fall_of,
    noise_of,
    visible_rise,
)
from agentlightning.algorithm.units import CreditRule
from agentlightning.errors import AgentError, kind_of
from agentlightning.metrics import Reporter
from agentlightning.models import examples_first

WATCHED_STEPS = 30
"""Steps after which the reward should have risen …"""
LOOK_AGAIN = 5
"""… and between one look at it and the next."""
TREND_LEVEL = 0.15
"""A reward may have risen when one without any trend would look like it this rarely. Generous on purpose: a dead run
is found at one of the next looks, and a healthy one is not accused (`scripts/calibration.py` has the rates). That it
has not risen is said with it; that it has takes `trend.has_risen`."""
VISIBLE = 0.12
"""No verdict while a rise of this share of the range of rewards would go unseen in the noise of the steps."""
NEARLY_SOLVED = 0.9
"""Nothing is said of a reward that has come this far from the lowest to the highest that a rollout earned."""
GO_BACK = (
    "Go back to the best checkpoint, and on from there with a third of the learning_rate, schedule='linear', or "
    "kl_coef=0.01."
)
"""What to do when the reward has fallen."""
FLAT_STEPS = 5
"""Steps in a row without any difference between siblings that are worth a word."""
_TOO_HARD = (
    "If it is always low, the tasks are too hard or the reward too strict: start with easier tasks or give partial "
    "rewards. If it is always high, the agent has nothing left to learn."
)

WAY_TO_THE_MODEL = (
    "Make its client use the endpoint it is given:  OpenAI(base_url=llm.endpoint, api_key=llm.api_key)  and  "
    "model=llm.model.  A program finds them in its environment: OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL (and "
    "the same of ANTHROPIC_ and GEMINI_). An async client's call is made only where it is awaited."
)
NEVER_CALLED = f"The agent never called the model: no call arrived at the gateway. {WAY_TO_THE_MODEL}"
KEEPS_ANSWERS = (
    "It probably keeps answers from one rollout to the next (functools.cache, a dictionary, a cache of its client). "
    "Turn that off: every rollout must ask the model itself, because its own answer is what is learned from."
)
CALLS_NO_LONGER = f"The agent called the model in earlier steps and calls it no longer. {KEEPS_ANSWERS}"


def never_called(episodes: Sequence[Episode], turned_away: Mapping[str, int]) -> str:
    """What to say where no call was answered: none arrived, or why those that did were refused."""
    refused = Counter(turned_away)
    refused.update(text for e in episodes for text in e.refused)
    if not refused:
        return NEVER_CALLED
    reason, count = refused.most_common(1)[0]
    return (
        f"No model call of the agent was answered: {refused.total()} arrived at the gateway, and all of them were "
        f"refused. Most common ({count}×): {reason}"
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
        turned_away: Mapping[str, int] | None = None,
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
        flat_steps: steps in a row without any difference after which a run that has never learned stops; 0: never.
        turned_away: what the gateway counts of requests that belonged to no attempt.
        selected_by: the settings that choose which calls are trained.
        objections: asked about the first step's rollouts, with `settings`.
        goes_on: what would be refused is said instead, and the run goes on.
        """
        self._objections, self._settings = objections, settings or {}
        self._looked = learned
        self._goes_on = goes_on
        self._selected_by = selected_by or {}
        self._flat_steps = flat_steps
        self._turned_away = {} if turned_away is None else turned_away
        self._rule = rule
        self._policies = policies
        self._compares = compares
        self._reporter = reporter
        self._learned = self._heard = learned
        self._flat = 0
        self._failed = 0
        self._highest = -math.inf
        self._lowest = math.inf
        self.solved = False
        """All siblings have earned the highest reward of the run for `FLAT_STEPS` steps, after learning: it is done."""
        self.stuck = False
        """There has been nothing to learn for a while, just now: what was learned by then should be saved."""
        self._told: set[str] = set()
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
            self._refuse(never_called(episodes, self._turned_away))
        elif not usable and (not self._learned or self._failed >= FLAT_STEPS):
            self._refuse(
                f"All {len(episodes)} rollouts of this step failed, so there is nothing to learn from. "
                f"{_most_common(failed)}\nTry the agent alone first:  agl doctor,  or  trainer.dev(agent, tasks)"
            )
        elif failed:
            self._tell(
                f"{len(failed)} of {len(episodes)} rollouts failed and are left out of the update. "
                f"{_most_common(failed)}"
            )
        if not usable:
            return
        if not any(e.calls for e in usable):
            silent = self._heard and not any(e.refused for e in usable)
            self._refuse(CALLS_NO_LONGER if silent else never_called(episodes, self._turned_away))
        elif not any(e.sampled_tokens for e in usable):
            self._refuse(_nothing_selected(usable, self._selected_by))
        self._heard = True
        self._check_names(usable)
        self._object(usable)
        if self._compares:
            self._check_variance(usable)

    def watch(self, metrics: Mapping[str, Any]) -> None:
        """After a step: say once that the reward has fallen, or, with the likeliest cause, that it has not risen.

        The verdict is a statistical test on the rewards of all steps so far (`algorithm.trend`), made at
        `WATCHED_STEPS` steps and every `LOOK_AGAIN` after them.
        """
        if not self._compares or metrics.get("reward") is None:
            return
        self._rewards.append(metrics["reward"])
        steps = len(self._rewards)
        if fall := fall_of(self._rewards, max(0.0, self._highest - self._lowest)):
            self._tell(
                f"The reward was {fall.best:.3g} {fall.since} steps ago and has fallen to {fall.now:.3g}. "
                f"{FALSE_ALARMS} {GO_BACK}",
                key="fell",
                verdict=True,
            )
            return
        if steps < WATCHED_STEPS or steps % LOOK_AGAIN or not self._stands_still():
            return
        third = steps // 3
        early, late = statistics.mean(self._rewards[:third]), statistics.mean(self._rewards[-third:])
        self._tell(
            f"The reward has not risen in {steps} steps: it was {early:.3g} in the first third of them and {late:.3g} "
            f"in the last, and varies by ±{noise_of(self._rewards):.2g} from step to step. {MISSED_RISES} "
            f"{_likely_cause(metrics)}",
            key="stands still",
            verdict=True,
        )

    def _stands_still(self) -> bool:
        """Whether it has not risen, is not high already, and its steps are not too noisy to tell."""
        spread = self._highest - self._lowest
        recent = statistics.mean(self._rewards[-(len(self._rewards) // 3) :])
        if spread > 0 and (
            recent >= self._lowest + NEARLY_SOLVED * spread or visible_rise(self._rewards, 0.05) > VISIBLE * spread
        ):
            return False
        return chance_of_no_rise(self._rewards) > TREND_LEVEL

    def _object(self, usable: Sequence[Episode]) -> None:
        """Say what speaks against the first rollouts there are; refuse to learn where it makes no sense."""
        if self._looked:
            return
        self._looked = True
        found = list(self._objections(usable, self._settings))
        for objection in found:
            if objection.refuses:
                self._refuse(objection.words)
            self._tell(objection.words)

    def _refuse(self, text: str) -> None:
        """Raises AgentError; says it once where the user wants to go on all the same."""
        if not self._goes_on:
            raise AgentError(text)
        self._tell(f"{text} (preflight='warn': the run goes on.)")

    def _check_names(self, usable: Sequence[Episode]) -> None:
        """Rewards that name agents who made no call would reach nobody."""
        rewarded = {r.agent for e in usable for r in e.rewards} - {None}
        calling = {c.info.agent for e in usable for c in e.calls} - {None}
        if rewarded and not rewarded & {*calling, *self._policies}:
            self._refuse(
                f"Rewards are for the agents {sorted(rewarded, key=str)}, and the calls were made by "
                f"{sorted(calling, key=str) or 'agents without a name'}, so no call earns anything. Give agents their "
                "names, as llm.for_agent('writer') does, or leave agent= out of emit_reward."
            )

    def _check_variance(self, usable: Sequence[Episode]) -> None:
        rewards = sorted({e.reward for e in usable if e.reward is not None})
        self._highest = max([self._highest, *rewards])
        self._lowest = min([self._lowest, *rewards])
        if groups_to_learn_from(usable, self._rule, self._policies):
            self._flat, self.stuck, self._learned = 0, False, True
            return
        self._flat += 1
        self.stuck = self._learned and self._flat == FLAT_STEPS
        if self._learned and self._flat >= FLAT_STEPS and rewards == [self._highest]:
            self.solved = True
            self._tell(
                f"For {FLAT_STEPS} steps every rollout earned the highest reward seen ({self._highest:g}): nothing is "
                "left to learn from these tasks, and training ends here.",
                verdict=True,
            )
        elif self.stuck:
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
        if key not in self._told:
            self._told.add(key)
            (self._reporter.verdict if verdict else self._reporter.warn)(text)


def _nothing_selected(usable: Sequence[Episode], selected_by: Mapping[str, str]) -> str:
    """Why no call is trained: which settings chose none, and what there was to choose from."""
    if not selected_by or not any(len(c.response_ids) for e in usable for c in e.calls):
        return "The model calls of this step hold no sampled tokens of the policy in training."
    names = {c.info.agent for e in usable for c in e.calls}
    seen = [
        *sorted(repr(name) for name in names if name),
        *(["calls without an agent's name"] if None in names else []),
    ]
    settings = " and ".join(f"{name}={pattern!r}" for name, pattern in selected_by.items())
    return (
        f"{settings} chooses none of this step's calls, so nothing is trained. Seen were: {', '.join(seen)}. What an "
        "agent says as trained_agents is train_agents here. Agents get their names from llm.for_agent(…) or from "
        "a framework's spans."
    )


def _same(steps: int, rewards: Sequence[float]) -> str:
    shown = ", ".join(f"{r:g}" for r in rewards[:5])
    return f"For {steps} steps all siblings earned the same reward ({shown}), so there was nothing to learn from."


def _likely_cause(metrics: Mapping[str, Any]) -> str:
    if metrics.get("learning_rate") == 0:
        return "The learning rate is 0, so nothing is learned: leave learning_rate out to take the model's default."
    if metrics.get("updates") == 0:
        return "Most groups have equal rewards: try a larger group_size, other tasks, or partial rewards."
    if metrics.get("clip_fraction", 0.0) > 0.2:
        return "Many tokens are clipped, so steps are too large: try a lower learning_rate."
    if metrics.get("entropy", 1.0) < 0.02:
        return "The model says the same every time (entropy near 0): try a higher temperature or an entropy_coef."
    return (
        "Look at a few rollouts (agl show): does the reward tell good answers from bad ones? If it does, try a higher "
        "learning_rate, or more rollouts per step (tasks_per_step, group_size)."
    )


def _most_common(failed: Sequence[Episode]) -> str:
    said = [(e.outcome.value, (e.attempt and e.attempt.error) or "no message") for e in failed]
    (kind, count), *_ = Counter((outcome, kind_of(error)) for outcome, error in said).most_common(1)
    outcome, error = next(one for one in said if (one[0], kind_of(one[1])) == kind)
    return f"Most common ({count}×): {outcome}: {error}"
