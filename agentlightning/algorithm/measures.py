"""What a step's row says: its rollouts, how a validation went, how far the run is and where its time goes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from agentlightning.algorithm.credit.assignment import groups_to_learn_from
from agentlightning.algorithm.credit.units import CreditRule
from agentlightning.algorithm.episode import Episode, Sampled, mean_reward, reward_parts
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.backend import Backend
from agentlightning.metrics.intervals import Bounds, bounds_of, expected_best, mean_interval
from agentlightning.types import Outcome

ENDED_WELL = (Outcome.OK, Outcome.TRUNCATED)
COLUMNS = (
    ("progress", "step", "s"),
    ("reward", "reward", ".3f"),
    ("val_reward", "val", ".3f"),
    ("failed", "failed", "d"),
    ("tokens", "tokens", ",d"),
    ("sampling_seconds", "sample s", ".1f"),
    ("learning_seconds", "learn s", ".1f"),
)
"""What is shown of a step whose rollouts were sampled."""
OF_ONE_POLICY = (("entropy", "entropy", ".3f"), ("clip_fraction", "clipped", ".1%"))
AT_THE_END = (("left", "left", "s"), ("note", "", "s"))
COLUMNS_OF_EXAMPLES = (
    ("progress", "step", "s"),
    ("loss", "loss", ".4f"),
    ("val_reward", "val", ".3f"),
    ("tokens", "tokens", ",d"),
    ("learning_seconds", "learn s", ".1f"),
)
"""What is shown of a step that learns examples: nothing earned a reward."""


def columns_of(settings: TrainingSettings) -> list[tuple[str, str, str]]:
    """What the terminal shows of each step: name, heading, format."""
    own = [(f"{name}/reward", name, ".3f") for name in settings.adapters]
    shown = [*COLUMNS, *(own or OF_ONE_POLICY)] if settings.samples else COLUMNS_OF_EXAMPLES
    return [*shown, *AT_THE_END]


def of_step(sampled: Sampled, settings: TrainingSettings) -> dict[str, Any]:
    """What a step's rollouts, or its examples, were like."""
    if not settings.samples:
        return of_examples(sampled)
    return of_rollouts(sampled, settings.credit_rule(), settings.adapters)


def of_rollouts(sampled: Sampled, rule: CreditRule, policies: Collection[str] = ()) -> dict[str, Any]:
    """How many rollouts there were, how they ended, what they earned, and how long their responses are."""
    episodes = [*sampled.episodes, *sampled.dropped]
    outcomes = Counter(e.outcome.value for e in episodes)
    return {
        "reward": mean_reward(episodes),
        **_spread([e.reward for e in episodes if e.reward is not None]),
        **{f"reward/{name}": value for name, value in reward_parts(episodes).items()},
        **_by_source(episodes),
        "rollouts": len(episodes),
        "failed": sum(n for outcome, n in outcomes.items() if outcome not in ENDED_WELL),
        "outcomes": dict(outcomes),
        "truncated": outcomes[Outcome.TRUNCATED.value] / max(len(episodes), 1),
        **_flat(episodes, rule, policies),
        "calls": sum(len(e.calls) for e in episodes),
        "tokens": sum(e.sampled_tokens for e in episodes),
        **_lengths(episodes),
        "tasks": list(sampled.tasks),
        **_groups(sampled.episodes),
        **({"dropped": len(sampled.dropped)} if sampled.dropped else {}),
    }


def of_examples(sampled: Sampled) -> dict[str, Any]:
    """How many examples a step learns, and how long they are. They were given: no reward of theirs is a measure."""
    calls = [c for e in sampled.episodes for c in e.calls]
    lengths = [len(c.response_ids) for c in calls]
    return {
        "examples": len(sampled.episodes),
        "calls": len(calls),
        "tokens": sum(lengths),
        **({"response_tokens_mean": fmean(lengths), "response_tokens_max": max(lengths)} if lengths else {}),
        "tasks": list(sampled.tasks),
        **_groups(sampled.episodes),
    }


def of_validation(episodes: Sequence[Episode], repeats: int) -> dict[str, float]:
    """Mean reward with its 95 % interval over tasks; with repeats of each task also the best of k of them.

    A failed rollout counts 0, whatever it had earned before: a user would see it fail. `episodes` holds the repeats of
    a task side by side. Where rewards are 0 and 1, the best of k is pass@k.
    """
    earned = [(e.reward or 0.0) if e.outcome in ENDED_WELL else 0.0 for e in episodes]
    tasks, bounds = [earned[i : i + repeats] for i in range(0, len(earned), repeats)], bounds_of(earned)
    metrics = {"val_reward": fmean(earned), **_interval("val", [fmean(r) for r in tasks], bounds)}
    k = 2
    while k <= repeats:
        best = [expected_best(rewards, k) for rewards in tasks]
        metrics |= {f"val_best@{k}": fmean(best), **_interval(f"val_best@{k}", best, bounds)}
        k *= 2
    return metrics


def _spread(rewards: Sequence[float]) -> dict[str, float]:
    if not rewards:
        return {}
    return {"reward_std": pstdev(rewards), "reward_min": min(rewards), "reward_max": max(rewards)}


def _by_source(episodes: Sequence[Episode]) -> dict[str, float]:
    """Mean reward by the data set of a mixture that the task is from."""
    names = {source for e in episodes if (source := e.rollout.metadata.get("source")) is not None}
    found = {name: mean_reward([e for e in episodes if e.rollout.metadata.get("source") == name]) for name in names}
    return {f"source/{name}/reward": value for name, value in sorted(found.items()) if value is not None}


def _interval(name: str, values: Sequence[float], bounds: Bounds) -> dict[str, float]:
    low, high = mean_interval(values, bounds=bounds)
    return {f"{name}_low": low, f"{name}_high": high}


def _flat(episodes: Sequence[Episode], rule: CreditRule, policies: Collection[str]) -> dict[str, float]:
    """The share of groups whose siblings all earned the same, of those with a rollout that counts."""
    groups = {e.rollout.group for e in episodes if rule.uses[e.outcome] != "mask"}
    if not groups:
        return {}
    return {"flat_groups": 1.0 - len(groups_to_learn_from(episodes, rule, policies) & groups) / len(groups)}


def _groups(episodes: Sequence[Episode]) -> dict[str, list[str]]:
    """The names of the groups that are learned, so that the step can be looked at again; chats have none."""
    names = dict.fromkeys(e.rollout.group for e in episodes)
    return {} if None in names else {"groups": [str(name) for name in names]}


def _lengths(episodes: Sequence[Episode]) -> dict[str, float]:
    """Of the responses of the policies in training: sampled tokens, and the share that was cut off."""
    calls = [c for e in episodes for c in e.calls if c.info.trained]
    if not calls:
        return {}
    tokens = [len(c.response_ids) for c in calls]
    return {
        "response_tokens_mean": fmean(tokens),
        "response_tokens_max": max(tokens),
        "cut_off": fmean(c.info.finish_reason == "length" for c in calls),
    }


TAUGHT_NOTHING = "nothing learned: siblings earned the same"


class Progress:
    """Keeps the time of a run since it began or was resumed."""

    def __init__(self, settings: TrainingSettings, tasks: int, done: int, position: int) -> None:
        """`tasks`: of an epoch. `done`: steps that were learned before, which took `position` tasks."""
        self._steps = settings.steps_of(tasks, done, position)
        self._done = done
        self._began = 0.0
        self._learning = self._steady = self._learning_seconds = 0.0

    def begin(self) -> None:
        """A step begins; the first one counts."""
        self._began = self._began or time.monotonic()

    def begin_learning(self) -> None:
        self._learning, self._steady = time.time(), time.monotonic()

    def end_learning(self) -> None:
        self._learning_seconds = time.monotonic() - self._steady

    def of_step(self, done: int, sampled: Sampled, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Seconds and times of the step, how many steps there will be, the seconds left at the pace so far, and what is
        odd about the step."""
        steps = self._steps
        pace = (time.monotonic() - self._began) / (done - self._done)
        updates = [value for name, value in metrics.items() if name.split("/")[-1] == "updates"]
        return {
            "sampling_seconds": sampled.seconds,
            "learning_seconds": self._learning_seconds,
            "sampling_from": sampled.began,
            "learning_from": self._learning,
            "time": time.time(),
            "steps": steps,
            "seconds_left": round(pace * max(0, steps - done), 1),
            **({"note": TAUGHT_NOTHING} if updates and not any(updates) else {}),
        }


async def time_split(backend: Backend) -> dict[str, float]:
    """Seconds since the start that the backend sampled, learned, and had nothing to do; and what was published."""
    stats = await backend.stats()
    if stats is None:
        return {}
    return {
        "model_sampling_seconds": stats.sampling_s,
        "model_learning_seconds": stats.learning_s,
        "model_idle_seconds": stats.idle_s,
        "cached_tokens": stats.cached_tokens,
        "prefill_tokens": stats.prefill_tokens,
        **({"published_bytes": stats.published_bytes} if stats.published_bytes else {}),
        **{f"publication_seconds/{name}": seconds for name, seconds in stats.publication_seconds.items()},
    }
