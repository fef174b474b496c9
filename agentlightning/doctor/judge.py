"""How far a judge of groups can be believed: its order of siblings beside that of labels, and its answers beside each
other.

Every number is a mean over groups, each of which counts the same, and its interval is of that mean (`mean_interval`):
the pairs of a group are not taken for independent. Nothing of the run is changed.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from agentlightning.algorithm.episode import make_episode
from agentlightning.algorithm.parts.group_judge import Judge, conversation_of, seed_of
from agentlightning.algorithm.prompts.comparison import Answers, split_common
from agentlightning.errors import ConfigError, JudgeError
from agentlightning.metrics.intervals import mean_interval
from agentlightning.store.base import LightningStore
from agentlightning.types import FINISHED_ROLLOUT, Outcome, Rollout
from agentlightning.types.data import RolloutRecord
from agentlightning.types.finding import counted
from agentlightning.types.reward import find_reward_spans, get_rewards

LEVEL = 0.95
SHOWN = (Outcome.OK, Outcome.TRUNCATED, Outcome.JUDGE_ERROR)
"""Outcomes of rollouts whose conversation is whole."""
_EXACT = 1e-9
LabelOf = Callable[[RolloutRecord], float | None]


@dataclass(frozen=True, slots=True)
class LabelledGroup:
    """Siblings with their labels, of which some may be missing."""

    records: Sequence[RolloutRecord]
    labels: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class JudgedGroup:
    """What a judge said of siblings, and their labels."""

    answers: Answers
    labels: Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over groups, with its interval."""

    value: float
    low: float
    high: float
    groups: int
    pairs: int | None = None
    """Pairs of siblings in these groups, where it is made of pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredJudge:
    """What is known of a judge. An estimate is None where no group says anything of it."""

    agreement: Estimate | None
    """Share of the pairs with different labels that it orders as the labels do; a tie counts one half."""
    kappa: Estimate | None
    """Cohen's κ of the order of all labelled pairs: better, equal or worse."""
    order_bias: Estimate | None
    """How much more it gives to the first shown than to the last, everything else the same."""
    self_agreement: Estimate | None
    """Of its two answers, as `min_agreement` means it, from -1 to 1."""
    groups: int
    """Groups that it answered about …"""
    masked: int
    """… and those of them on which it agrees with itself too little: agreement and κ are of the others."""


# ---- groups and labels -----------------------------------------------------------------------------------------------


async def groups_of(store: LightningStore, run_id: str | None, size: int | None) -> dict[str, list[Rollout]]:
    """The finished rollouts of a run by group, in order; of more than `size`, which a step that was done again has, the
    last ones. Raises ConfigError where there is no group."""
    runs = None if run_id is None else (run_id,)
    found: dict[str, list[Rollout]] = {}
    for rollout in await store.query_rollouts(
        run_id_in=runs, status_in=tuple(FINISHED_ROLLOUT), sort_by="start_time", limit=-1
    ):
        if (name := rollout.group) is not None:
            found.setdefault(name, []).append(rollout)
    found = {name: group[-size:] if size else group for name, group in found.items() if len(group) > 1}
    if not found:
        raise ConfigError(
            "The run has no groups: no two rollouts of one task that were sampled together. Name a run that was "
            "trained with a group_size of at least 2."
        )
    return found


async def choose_groups(
    store: LightningStore, groups: Mapping[str, Sequence[Rollout]], label_of: LabelOf | None, most: int
) -> list[LabelledGroup]:
    """At most so many at random, the same ones each time; with labels only groups in which two have one."""
    names = sorted(groups)
    random.Random(0).shuffle(names)
    found: list[LabelledGroup] = []
    for name in names:
        if len(found) == most:
            break
        records = await store.query_records([r.rollout_id for r in groups[name]])
        whole = [r for r in records if r.attempt is not None and r.attempt.outcome in SHOWN]
        labels = [None if label_of is None else label_of(r) for r in whole]
        if len(whole) > 1 and (label_of is None or sum(label is not None for label in labels) > 1):
            found.append(LabelledGroup(whole, labels))
    return found


def refuse_without_order(groups: Sequence[LabelledGroup], labels: str | None) -> None:
    """Raises ConfigError where there is nothing to judge, or labels order nothing."""
    if not groups and labels is None:
        raise ConfigError("No group has two rollouts that ended well: there is nothing to judge.")
    if not groups:
        raise ConfigError(f"No group has two rollouts with a label of '{labels}': there is nothing to compare.")
    if labels is not None and not any(_differ(a, b) for group in groups for a, b in combinations(group.labels, 2)):
        raise ConfigError(
            f"In each of {counted(len(groups), 'group')} all labels of '{labels}' are equal, so they order nothing. "
            "Label groups whose rollouts differ."
        )


def _differ(first: float | None, second: float | None) -> bool:
    return first is not None and second is not None and first != second


def labels_in(file: Path, known: Sequence[str]) -> dict[str, float]:
    """The labels of a file, by rollout: a line {"rollout_id": …, "label": number, true or false} for each; null is none
    yet. Raises ConfigError for what is no label, and for rollouts that are not `known`."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"The labels cannot be read: {error}.") from error
    found: dict[str, float] = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and (pair := _label_in(line, f"{file}, line {number}")) is not None:
            rollout_id, label = pair
            if found.setdefault(rollout_id, label) != label:
                raise ConfigError(f"{file}, line {number}: rollout {rollout_id} has two labels; give one.")
    if not found:
        raise ConfigError(f"{file} has no label yet: put numbers, true or false in place of null.")
    if strange := sorted(found.keys() - set(known)):
        raise ConfigError(
            f"{len(strange)} of {len(found)} labels in {file} are of rollouts that are in no group of this run, such "
            f"as {strange[0]}. Is it the file of another run?"
        )
    return found


def _label_in(line: str, where: str) -> tuple[str, float] | None:
    try:
        row = json.loads(line)
        rollout_id, label = str(row["rollout_id"]), row["label"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f'{where} is not {{"rollout_id": …, "label": …}}.') from None
    if label is None:
        return None
    if not isinstance(label, bool | int | float) or not abs(label) < float("inf"):
        raise ConfigError(f"{where}: the label is {label!r}; give a number, true or false.")
    return rollout_id, float(label)


def reward_labels(part: str | None, weights: Mapping[str, float], judged: str | None) -> LabelOf:
    """The rewards of a run as labels: the one that counts, or a part of it. `judged` is the part that the run's own
    judge gave, which says nothing of a judge: ConfigError."""
    if judged is not None and (part == judged or (part is None and weights.get(judged))):
        raise ConfigError(
            f"The run's reward has its judge's own score, '{judged}', in it, which cannot label a judge. Name another "
            "part, --labels reward/NAME, or a file."
        )

    def label_of(record: RolloutRecord) -> float | None:
        parts = [get_rewards(span) for span in find_reward_spans(record.spans)]
        if part is not None:
            return next((found[part] for found in reversed(parts) if part in found), None)
        if judged is not None and all(set(found) == {judged} for found in parts):
            return None
        return make_episode(record.rollout, record.attempt, record.calls, record.spans, weights).reward

    return label_of


async def template_of(store: LightningStore, groups: Sequence[LabelledGroup]) -> str:
    """Lines for people to fill in: each rollout with its task, its answer, and no label."""
    lines: list[str] = []
    for group in groups:
        _, rest = split_common([await conversation_of(store, record) for record in group.records])
        for record, answer in zip(group.records, rest, strict=True):
            rollout = record.rollout
            about: dict[str, Any] = {"rollout_id": rollout.rollout_id, "group": rollout.metadata.get("group")}
            row = {**about, "task": rollout.input, "answer": "\n".join(answer), "label": None}
            lines.append(json.dumps(row, ensure_ascii=False, default=repr) + "\n")
    return "".join(lines)


# ---- asking ----------------------------------------------------------------------------------------------------------


async def judge_groups(
    judge: Judge, store: LightningStore, groups: Sequence[LabelledGroup], seed: int, at_once: int
) -> tuple[list[JudgedGroup], list[str]]:
    """What the judge says of each group, as a run of this seed would ask it; and why, where it gave no answer.
    Cancelled, it returns what there is by then."""
    turns, judged, failed = asyncio.Semaphore(at_once), dict[int, JudgedGroup](), list[str]()

    async def one(number: int, group: LabelledGroup) -> None:
        async with turns:
            shown = [await conversation_of(store, record) for record in group.records]
            try:
                judged[number] = JudgedGroup(await judge.answers(shown, seed_of(seed, group.records)), group.labels)
            except JudgeError as error:
                failed.append(str(error))

    tasks = [asyncio.create_task(one(number, group)) for number, group in enumerate(groups)]
    try:
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [judged[number] for number in sorted(judged)], failed


# ---- what it comes to ------------------------------------------------------------------------------------------------


def measure(judged: Sequence[JudgedGroup], *, min_agreement: float = -1.0, equal: float = 0.0) -> MeasuredJudge:
    """`equal`: scores that differ by no more count as equal."""
    kept = [one for one in judged if one.answers.agreement >= min_agreement]
    orders = [found for one in kept if (found := _orders(one, equal))]
    return MeasuredJudge(
        agreement=_agreement(orders),
        kappa=_kappa(orders),
        order_bias=_order_bias(judged),
        self_agreement=_mean([one.answers.agreement for one in judged], (-1.0, 1.0)),
        groups=len(judged),
        masked=len(judged) - len(kept),
    )


def _orders(one: JudgedGroup, equal: float) -> list[tuple[int, int]]:
    """The order of each labelled pair, by the judge and by the labels: 1 is better, 0 equal, -1 worse."""
    scores = [s.score for s in one.answers.scores]
    labelled = [(score, label) for score, label in zip(scores, one.labels, strict=True) if label is not None]
    return [(_sign(a[0] - b[0], equal + _EXACT), _sign(a[1] - b[1], 0.0)) for a, b in combinations(labelled, 2)]


def _sign(difference: float, equal: float) -> int:
    return 0 if abs(difference) <= equal else 1 if difference > 0 else -1


def _agreement(orders: Sequence[Sequence[tuple[int, int]]]) -> Estimate | None:
    telling = [found for pairs in orders if (found := [pair for pair in pairs if pair[1] != 0])]
    shares = [fmean(0.5 if verdict == 0 else float(verdict == label) for verdict, label in pairs) for pairs in telling]
    return _mean(shares, (0.0, 1.0), sum(map(len, telling)))


def _kappa(orders: Sequence[Sequence[tuple[int, int]]]) -> Estimate | None:
    """κ = (p_o - p_e) / (1 - p_e). Which of two stands first is arbitrary, so better and worse are equally frequent by
    chance: p_e = t u + (1 - t) (1 - u) / 2, with the shares of ties t and u. The interval is that of p_o."""
    same = _mean(
        [fmean(float(verdict == label) for verdict, label in pairs) for pairs in orders],
        (0.0, 1.0),
        sum(map(len, orders)),
    )
    if same is None:
        return None
    judged, labelled = (fmean(fmean(float(pair[who] == 0) for pair in pairs) for pairs in orders) for who in (0, 1))
    chance = judged * labelled + (1 - judged) * (1 - labelled) / 2
    if chance == 1.0:
        return None
    value, low, high = ((p - chance) / (1 - chance) for p in (same.value, same.low, same.high))
    return Estimate(value=value, low=low, high=high, groups=same.groups, pairs=same.pairs)


def _order_bias(judged: Sequence[JudgedGroup]) -> Estimate | None:
    """A rollout stands at a place in one question and at the mirrored one in the other; what it is worth cancels. By
    least squares: Σ d x / Σ x², d the difference of its scores and x that of its places, from -1 to 1."""
    slopes: list[float] = []
    most = 1.0
    for one in judged:
        last = len(one.answers.order) - 1
        places = {number: place for place, number in enumerate(one.answers.order)}
        x = [(last - 2 * places[number]) / last for number in range(last + 1)]
        scored = zip(one.answers.first, one.answers.second, strict=True)
        square = sum(v * v for v in x)
        slopes.append(sum((a.score - b.score) * v for (a, b), v in zip(scored, x, strict=True)) / square)
        most = max(most, sum(map(abs, x)) / square)
    return _mean(slopes, (-most, most))


def _mean(values: Sequence[float], bounds: tuple[float, float], pairs: int | None = None) -> Estimate | None:
    if not values:
        return None
    low, high = mean_interval(values, LEVEL, bounds)
    return Estimate(value=fmean(values), low=low, high=high, groups=len(values), pairs=pairs)
