"""The metrics that runs report: what each is called, where it belongs, its unit, what it means, and how it is drawn.

Pages, tables and the documentation take their titles, units and sentences from here, so a metric has one name
everywhere; what a feature reports stands in its own file (`algorithm.catalogue` has all). No title occurs twice. A `…`
in a name stands for any text: a part of a reward, a provider, an opponent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

Kind = Literal["curve", "counter", "figure", "hidden"]
"""A line over steps; a total since the run began, of which the growth per step is drawn; its last value; not drawn."""
REWARD, STABLE, TOKENS, TIME = "Reward and validation", "Is it stable", "Where tokens go", "Where time goes"
ENGINE, INTERNALS = "Engine against learner", "Internals"
GROUPS = (REWARD, STABLE, TOKENS, TIME, ENGINE, INTERNALS)
"""In the order in which pages show them."""


_MOST_OWN = 200
"""Metrics of own parts that pages describe; a run's file may be a stranger's."""


class Metric(NamedTuple):
    """One metric of a step."""

    name: str
    title: str
    group: str
    unit: str
    sentence: str
    kind: Kind = "curve"


METRICS: tuple[Metric, ...] = (
    Metric("reward", "Reward", REWARD, "", "The mean reward of the step's training rollouts that have one."),
    Metric("val_reward", "Validation reward", REWARD, "", "The mean reward over the validation tasks."),
    Metric("val_low", "Validation interval, low end", REWARD, "", "The low end of the validation's 95 % interval.", "hidden"),
    Metric("val_high", "Validation interval, high end", REWARD, "", "The high end of the validation's 95 % interval.", "hidden"),
    Metric("val_best@…", "Best of … validation rollouts", REWARD, "", "The reward of the best of so many rollouts of a validation task, estimated without bias; pass@k if rewards are 0 and 1."),
    Metric("val_best@…_low", "Best of … validation rollouts, low end", REWARD, "", "The low end of its 95 % interval.", "hidden"),
    Metric("val_best@…_high", "Best of … validation rollouts, high end", REWARD, "", "The high end of its 95 % interval.", "hidden"),
    Metric("best_val", "Best validation of a prompt", REWARD, "", "The highest mean validation reward of any candidate of this round."),
    Metric("reward/…", "Reward part: …", REWARD, "", "The mean of a named part of the rewards."),
    Metric("source/…/reward", "Reward on …", REWARD, "", "The mean reward of the tasks of one data set of a mixture."),
    Metric("reward_std", "Spread of rewards", REWARD, "", "The standard deviation of the step's rewards."),
    Metric("reward_min", "Lowest reward", REWARD, "", "The lowest reward of the step."),
    Metric("reward_max", "Highest reward", REWARD, "", "The highest reward of the step."),
    Metric("flat_groups", "Groups without a difference", REWARD, "share", "The share of groups whose siblings all earned the same; they teach nothing."),
    Metric("failed", "Failed rollouts", REWARD, "rollouts", "How many of the step's rollouts failed."),
    Metric("outcomes", "Outcomes", REWARD, "rollouts", "How each rollout of the step ended.", "hidden"),
    Metric("loss", "Loss", STABLE, "", "The loss of the step's updates. In supervised training it is the mean nats per token of the examples."),
    Metric("entropy", "Entropy", STABLE, "nats", "The mean entropy of the model at sampled tokens; near 0 it no longer explores."),
    Metric("grad_norm", "Gradient norm", STABLE, "", "The size of the gradient before it was clipped."),
    Metric("clip_fraction", "Clipped tokens", STABLE, "share", "The share of tokens whose ratio was clipped."),
    Metric("kl_old", "KL to the sampling weights", STABLE, "nats", "How far the policy moved from the weights that sampled the tokens, per token."),
    Metric("kl_step", "KL of one update", STABLE, "nats", "How far the step's largest update moved the policy, per token."),
    Metric("ratio_min", "Lowest ratio", STABLE, "", "The lowest ratio π / π_old of a sampled token, before each update."),
    Metric("ratio_max", "Highest ratio", STABLE, "", "The highest ratio π / π_old of a sampled token, before each update."),
    Metric("staleness", "Age of the oldest token", STABLE, "updates", "How many updates the oldest sampled token is behind the weights."),
    Metric("effective_sample_size", "Effective samples", STABLE, "share", "The effective sample size of the importance weights, as a share of the tokens: (Σw)² / (n Σw²)."),
    Metric("tokens", "Sampled tokens", TOKENS, "tokens", "The tokens sampled by the step's rollouts, or contained in its examples."),
    Metric("trained_tokens", "Trained tokens", TOKENS, "tokens", "The tokens in the loss."),
    Metric("tree_tokens", "Computed tokens", TOKENS, "tokens", "The tokens computed for the loss; tokens that calls share count once."),
    Metric("response_tokens_mean", "Length of a response", TOKENS, "tokens", "The mean length of a trained call's response."),
    Metric("response_tokens_max", "Longest response", TOKENS, "tokens", "The length of the longest trained response."),
    Metric("truncated", "Rollouts ended by a limit", TOKENS, "share", "The share of rollouts ended by a limit of the run: calls, tokens or context."),
    Metric("cut_off", "Responses cut off", TOKENS, "share", "The share of trained responses that ended at a limit of tokens, most often the `max_tokens` of their request."),
    Metric("dropped", "Dropped rollouts", TOKENS, "rollouts", "With `dynamic_sampling`: rollouts of groups whose siblings all earned the same; they are not learned."),
    Metric("prefill_tokens", "Prompt tokens computed", TOKENS, "tokens", "The prompt tokens that the engine computed, since the run began.", "counter"),
    Metric("cached_tokens", "Prompt tokens from the cache", TOKENS, "tokens", "The prompt tokens that the engine had in its cache, since the run began.", "counter"),
    Metric("rollouts", "Rollouts", TOKENS, "rollouts", "How many rollouts the step had; an optimiser of prompts counts those since it began."),
    Metric("examples", "Examples", TOKENS, "examples", "How many examples the step learned."),
    Metric("calls", "Model calls", TOKENS, "calls", "The model calls of the step's rollouts."),
    Metric("provider/…/calls", "Calls of …", TOKENS, "calls", "The calls of another provider's model, since the run began.", "counter"),
    Metric("provider/…/tokens", "Tokens of …", TOKENS, "tokens", "The tokens of another provider's model, since the run began.", "counter"),
    Metric("provider/…/cost", "Cost of …", TOKENS, "price", "What another provider's model has cost since the run began, where it has a price.", "counter"),
    Metric("critic_calls", "Calls of the prompt critic", TOKENS, "calls", "The calls of the model that criticises prompts, since the run began.", "counter"),
    Metric("critic_tokens", "Tokens of the prompt critic", TOKENS, "tokens", "The tokens of the model that criticises prompts, since the run began.", "counter"),
    Metric("cost", "Cost", TOKENS, "price", "What all calls have cost since the run began, where they have a price.", "counter"),
    Metric("sampling_seconds", "Sampling", TIME, "s", "The wall clock of the step's rollouts."),
    Metric("learning_seconds", "Learning", TIME, "s", "The wall clock of the step's updates, with publishing the weights."),
    Metric("model_sampling_seconds", "The model samples", TIME, "s", "The seconds that the model process sampled, since the run began.", "counter"),
    Metric("model_learning_seconds", "The model learns", TIME, "s", "The seconds that the model process learned, since the run began.", "counter"),
    Metric("model_idle_seconds", "The model waits", TIME, "s", "The seconds that the model process was idle, since the run began.", "counter"),
    Metric("publication_seconds", "Publishing", TIME, "s", "The wall clock of publishing the step's weights to the engines."),
    Metric("publication_seconds/…", "Publishing to …", TIME, "s", "The time this engine took to load the last published weights."),
    Metric("published_bytes", "Published weights", TIME, "bytes", "The bytes of weights written to the engines' machines, since the run began; the engines of a machine share one copy.", "counter"),
    Metric("seconds", "Time since the start", TIME, "s", "The seconds since the run began.", "figure"),
    Metric("time", "When the step ended", TIME, "s", "When the step ended, in seconds since the epoch.", "hidden"),
    Metric("sampling_from", "When sampling began", TIME, "s", "When the step's sampling began, in seconds since the epoch.", "hidden"),
    Metric("learning_from", "When learning began", TIME, "s", "When the step's learning began, in seconds since the epoch.", "hidden"),
    Metric("seconds_left", "Time left", TIME, "s", "How long the remaining steps will take at this pace.", "hidden"),
    Metric("learning_rate", "Learning rate", INTERNALS, "", "The step's learning rate, after its schedule."),
    Metric("updates", "Updates", INTERNALS, "updates", "The optimiser steps of this step."),
    Metric("halvings", "Halved updates", INTERNALS, "", "How often the step's updates were halved for `max_kl`."),
    Metric("version", "Weight version", INTERNALS, "", "The version of the weights after the step.", "figure"),
    Metric("candidates", "Candidates", INTERNALS, "prompts", "How many prompts were tried so far.", "figure"),
    Metric("rejected_edits", "Rejected edits", INTERNALS, "edits", "How many edits of prompts were rejected so far.", "figure"),
    Metric("val_tasks", "Validated tasks", INTERNALS, "tasks", "On how many validation tasks the best prompt was tried so far.", "figure"),
    Metric("step", "Step", INTERNALS, "", "The step's number.", "hidden"),
    Metric("steps", "Total steps", INTERNALS, "", "How many steps there will be.", "hidden"),
    Metric("note", "Note", INTERNALS, "", "Remarks on this step.", "hidden"),
    Metric("tasks", "Tasks", INTERNALS, "", "Which tasks the step took, as indices into the data set.", "hidden"),
    Metric("groups", "Groups", INTERNALS, "", "The names of the groups that were learned, as `agl show --group` takes them.", "hidden"),
)  # fmt: skip

_MEASURED_ALONE = (
    Metric("failed", "Rollouts that failed", STABLE, "share", "The share of rollouts that failed."),
    Metric("masked", "Rollouts left out", STABLE, "share", "The share of rollouts that are not learned from, because of how they ended."),
    Metric("prompt_tokens_lost", "Prompt tokens computed twice", TOKENS, "share", "The share of prompt tokens computed again because a call did not continue the one before it."),
    Metric("same_answers", "Rollouts that repeat a sibling", STABLE, "share", "The share of rollouts that say word for word what a sibling said."),
    Metric("repeated_phrases", "Rollouts that repeat a phrase", STABLE, "share", "The share of rollouts that say one phrase over and over."),
    Metric("rewarded_without_tools", "Full reward without a tool", REWARD, "share", "The share of the rollouts with the highest reward that used none of their tools."),
    Metric("length_reward_correlation", "Correlation of length and reward", REWARD, "", "Above 0 longer answers earn more than their siblings, below 0 shorter ones do (rank correlation)."),
    Metric("signal_to_noise", "Signal to noise of the gradient", STABLE, "", "The size of the gradient against its noise, from two halves of a step."),
)  # fmt: skip

COUNTED = (
    Metric("steps", "Steps learned", INTERNALS, "steps", "How many steps were learned."),
    Metric("reward_first", "Reward at first", REWARD, "", "The mean reward of the first steps."),
    Metric("reward_last", "Reward at the last", REWARD, "", "The mean reward of the last steps."),
    Metric("loss_first", "Loss at first", STABLE, "nats per token", "The loss of the first step of supervised training."),
    Metric("loss_last", "Loss at the last", STABLE, "nats per token", "The loss of the last step of supervised training."),
    Metric("rollouts_read", "Rollouts that were read", INTERNALS, "rollouts", "How many of the last rollouts were read."),
    Metric("groups", "Groups that were read", INTERNALS, "groups", "How many groups of siblings were read."),
    Metric("reward_by_difficulty", "Groups by how often they succeed", REWARD, "groups", "How many groups never, seldom, often and always earn what is best."),
    Metric("calls_per_rollout", "Calls of a rollout", TOKENS, "calls", "The mean number of model calls of a rollout."),
    Metric("sampled_tokens_per_rollout", "Sampled tokens of a rollout", TOKENS, "tokens", "The mean number of tokens that a rollout samples."),
    Metric("longest_call_tokens", "Longest call", TOKENS, "tokens", "The most tokens of a call, prompt and response together."),
    Metric("prefix_breaks", "Breaks of token histories", TOKENS, "calls", "How many calls did not continue the call before them."),
    Metric("tokens_lost_per_step", "Tokens computed twice", TOKENS, "tokens per step", "The prompt tokens of a step that are computed again because of breaks."),
    Metric("seconds_lost_per_step", "Time lost to breaks", TIME, "s per step", "The time of a step that breaks of token histories cost."),
)  # fmt: skip
"""What the doctor counts besides; pages do not show it."""

MEASURED = (
    *(metric for metric in METRICS if metric.name in ("flat_groups", "truncated", "effective_sample_size")),
    *_MEASURED_ALONE,
)
"""What the doctor measures over the rollouts it read; the same names as in its record."""


def find_measured(name: str) -> Metric | None:
    """What the doctor measures by this name; None for another one."""
    return next((metric for metric in (*MEASURED, *COUNTED) if metric.name == name), None)


class Catalogue:
    """A table of metrics, as runs name them."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.metrics = tuple(metrics)
        self._places = {metric.name: place for place, metric in enumerate(self.metrics)}
        self._patterns = [
            (re.compile(re.escape(metric.name).replace("…", "(.+)")), place)
            for place, metric in sorted(enumerate(self.metrics), key=lambda one: -len(one[1].name))
            if "…" in metric.name
        ]

    def find(self, name: str) -> Metric | None:
        """The metric of this name as a run reports it, with its title filled in; None for one that is not in the table.

        Where several policies learn, `solver/loss` is the loss of the policy `solver`.
        """
        return None if (found := self._find(name)) is None else found[1]

    def described(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
        """What there is to say of each number in these rows, in the order of the table; of a user's own only its
        name."""
        found: list[tuple[int, str, Metric]] = []
        for name in {name for row in rows for name, value in row.items() if _is_number(value)}:
            own = Metric(name, name.replace("_", " ").capitalize(), INTERNALS, "", "A metric of your own.")
            place, metric = self._find(name) or (len(self.metrics), own)
            found.append((place, name, metric))
        return {name: metric._asdict() for _, name, metric in sorted(found)}

    def with_own(self, described: Any) -> Catalogue:
        """This table and the metrics of a user's own parts, as a run keeps them; anything else in them is left out."""
        found = described[:_MOST_OWN] if isinstance(described, list) else []
        own = [metric for one in found if (metric := _metric(one)) is not None and self._find(metric.name) is None]
        return Catalogue((*self.metrics, *own)) if own else self

    def _find(self, name: str) -> tuple[int, Metric] | None:
        """The place of a metric in the table, and the metric."""
        if (place := self._places.get(name)) is not None:
            return place, self.metrics[place]
        for pattern, place in self._patterns:
            if (found := pattern.fullmatch(name)) is not None:
                title = self.metrics[place].title.replace("…", found[1])
                return place, self.metrics[place]._replace(name=name, title=title)
        policy, _, rest = name.partition("/")
        if (place := self._places.get(rest)) is None:
            return None
        metric = self.metrics[place]
        return place, metric._replace(name=name, title=f"{metric.title} of {policy}")


def _metric(described: Any) -> Metric | None:
    """The metric that `Metric._asdict` described; None for what is none."""
    if not isinstance(described, dict) or not all(isinstance(described.get(name), str) for name in Metric._fields):
        return None
    one = Metric(**{name: described[name] for name in Metric._fields})
    known = one.group in GROUPS and one.kind in get_args(Kind) and one.name
    return one if known and one.name.count("…") <= 1 else None  # a pattern with many would be slow to match


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
