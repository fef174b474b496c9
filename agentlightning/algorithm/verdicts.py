"""Verdicts that a run says of itself and the doctor says of it afterwards: one test, one text, one advice. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.trend import (
    FALSE_ALARMS,
    MISSED_RISES,
    chance_of_no_rise,
    fall_of,
    noise_of,
    visible_rise,
)
from agentlightning.types.finding import Finding, problem, warning
from agentlightning.types.names import NO_SUCH_PATH

WATCHED_STEPS = 30
"""Steps after which the reward should have risen."""
TREND_LEVEL = 0.15
"""A reward may have risen when one without any trend would look like it this rarely. Generous on purpose: a dead run
is found at one of the next looks, and a healthy one is not accused (`scripts/calibration.py` has the rates). That it
has not risen is said with it; that it has takes `trend.has_risen`."""
VISIBLE = 0.12
"""No verdict while a rise of this share of the range of rewards would go unseen in the noise of the steps."""
NEARLY_SOLVED = 0.9
"""Nothing is said of a reward that has come this far from the lowest to the highest that a rollout earned."""
CLIPPED = 0.2
"""The share of clipped tokens from which on steps are too large."""
EXAMPLES = 3
"""So many reasons, or rollouts, are named in the evidence of a finding."""
SHOWN_PARTS = 8
"""So many of the parts of rewards that there are are named; agents name them."""

KEEPS_ANSWERS = (
    "It probably keeps answers from one rollout to the next (functools.cache, a dictionary, a cache of its client). "
    "Turn that off: every rollout must ask the model itself, because its own answer is what is learned from."
)
"""What to do about an agent that earns rewards without asking the model."""
_WAY_TO_THE_MODEL = (
    "Make its client use the endpoint it is given:  OpenAI(base_url=llm.endpoint, api_key=llm.api_key)  and  "
    "model=llm.model.  A program finds them in its environment: OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL (and "
    "the same of ANTHROPIC_ and GEMINI_). An async client's call is made only where it is awaited."
)
_GO_BACK = (
    "Go back to the best checkpoint, and on from there with a third of the learning_rate, schedule='linear', or "
    "kl_coef=0.01."
)


# ---- the reward of a run ---------------------------------------------------------------------------------------------


def fallen(rewards: Sequence[float], lowest: float, highest: float) -> Finding | None:
    """Whether a run's reward has fallen from where it was. `rewards` is the mean of each step, from the first on;
    `lowest` and `highest` are what single rollouts earned.
    """
    fall = fall_of(rewards, max(0.0, highest - lowest))
    if fall is None:
        return None
    return problem(
        "reward_fell",
        f"The reward was {fall.best:.3g} {fall.since} steps ago and has fallen to {fall.now:.3g}. {FALSE_ALARMS}",
        _GO_BACK,
        best=fall.best,
        steps_ago=fall.since,
        now=fall.now,
    )


def not_risen(rewards: Sequence[float], lowest: float, highest: float, metrics: Mapping[str, Any]) -> Finding | None:
    """Whether a run's reward has not risen, with the likeliest cause by the `metrics` of its last step; the rest as in
    `fallen`. None also where it is high already, or its steps are too noisy to tell.
    """
    spread = max(0.0, highest - lowest)
    if not may_stand_still(rewards) or _is_high(rewards, lowest, spread) or _is_too_noisy(rewards, spread):
        return None
    third = len(rewards) // 3
    first, last, noise = statistics.mean(rewards[:third]), statistics.mean(rewards[-third:]), noise_of(rewards)
    return warning(
        "not_rising",
        f"The reward has not risen in {len(rewards)} steps: it was {first:.3g} in the first third of them and "
        f"{last:.3g} in the last, and varies by ±{noise:.2g} from step to step. {MISSED_RISES}",
        _likely_cause(metrics),
        first_third=first,
        last_third=last,
        noise=noise,
    )


def may_stand_still(rewards: Sequence[float]) -> bool:
    """Whether a run has had its time, and a test for one look sees no rise."""
    return len(rewards) >= WATCHED_STEPS and chance_of_no_rise(rewards) > TREND_LEVEL


def _is_high(rewards: Sequence[float], lowest: float, spread: float) -> bool:
    return spread > 0 and statistics.mean(rewards[-(len(rewards) // 3) :]) >= lowest + NEARLY_SOLVED * spread


def _is_too_noisy(rewards: Sequence[float], spread: float) -> bool:
    return spread > 0 and visible_rise(rewards, 0.05) > VISIBLE * spread


def _likely_cause(metrics: Mapping[str, Any]) -> str:
    if metrics.get("learning_rate") == 0:
        return "The learning rate is 0, so nothing is learned: leave learning_rate out to take the model's default."
    if metrics.get("updates") == 0:
        return "Most groups have equal rewards: try a larger group_size, other tasks, or partial rewards."
    if (metrics.get("clip_fraction") or 0.0) > CLIPPED:
        return "Many tokens are clipped, so steps are too large: try a lower learning_rate."
    if (entropy := metrics.get("entropy")) is not None and entropy < 0.02:
        return "The model says the same every time (entropy near 0): try a higher temperature or an entropy_coef."
    return (
        "Read a few rollouts (agl show): does the reward tell good answers from bad ones? If it does, try three times "
        "the learning_rate, or more rollouts per step (tasks_per_step, group_size)."
    )


# ---- agents that do not reach the model ------------------------------------------------------------------------------


def unheard(episodes: Sequence[Episode], turned_away: Mapping[str, int]) -> Finding:
    """Why no call of these rollouts was answered: none arrived, or why those that did were refused.

    turned_away: requests to the gateway that belonged to no attempt, by why they were refused.
    """
    asked = Counter(text for e in episodes for text in e.refused)
    refused = Counter(turned_away) + asked
    if not refused:
        words = "The agent never called the model: no call arrived at the gateway."
        return problem("never_called", words, _WAY_TO_THE_MODEL, turned_away={})
    reason, count = refused.most_common(1)[0]
    words = (
        f"No model call of the agent was answered: {refused.total()} arrived at the gateway, and all of them were "
        f"refused. Most common ({count}×): {reason}"
    )
    asked.update({text: n for text, n in turned_away.items() if text.startswith(NO_SUCH_PATH)})
    if not asked:
        return problem("never_called", words, _WAY_TO_THE_MODEL, turned_away=dict(turned_away))
    fix = (
        "The base URL is right: the calls arrive. Mend what the message names, in the settings of the program or of "
        "its client; docs/clients.md says which programs need one."
    )
    return problem("calls_refused", words, fix, refused=dict(asked.most_common(EXAMPLES)))


def calls_no_longer() -> Finding:
    """What is to be said of an agent that called the model in earlier steps."""
    return problem("answers_kept", "The agent called the model in earlier steps and calls it no longer.", KEEPS_ANSWERS)


def absent_part(name: str, whose: str, known: Collection[str]) -> str:
    """What is said where no rollout's reward has the part `name`, and a setting needs it: `whose` says which, " of
    watched_parts" or ", which has a constraint". `known` are the parts that rewards have."""
    has = f"They have: {', '.join(sorted(known)[:SHOWN_PARTS])}." if known else "They have no named parts."
    return (
        f"No rollout's reward has the part '{name}'{whose}. {has} An agent names parts: "
        f"agl.emit_reward({{'right': 1.0, '{name}': 0.5}}, primary_key='right')."
    )
