"""Measure how often what is said holds: each interval, verdict and promise, on simulated runs.

    python scripts/calibration.py            # a table
    python scripts/calibration.py --write    # … into docs/diagnosis.md
    python scripts/calibration.py --quick    # fewer runs; a test holds them to the same bounds

A verdict has two rates: how often it is said where it is not so, at one look and at a look after each step, and how
often it is said where it is so. Runs have five shapes: flat, a line, early, late, and a jump; `tumble` falls again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentlightning.algorithm.prompts.significance import evidence, least_gain, threshold
from agentlightning.algorithm.verdicts import (
    LOOKED_RATE,
    WATCHED_STEPS,
    Validated,
    fall_of,
    has_overfitted,
    has_risen,
    may_stand_still,
)
from agentlightning.metrics.intervals import POWER, is_positive, mean_interval, paired_difference, visible_gain, widened

PAGE = Path(__file__).parents[1] / "docs" / "diagnosis.md"
MARKS = "<!-- calibration -->\n", "<!-- /calibration -->\n"
SHAPES = ("line", "early", "late", "jump")
BATCHES = ((2, 4), (8, 4), (16, 8))
"""Tasks and rollouts of each, in a step."""
STEPS, FIRST = 60, 8
LEVEL, PROMOTED = 0.95, 0.05
CANDIDATES, EVERY = 8, 12

Rng = np.random.Generator


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    said: str
    where: str
    promised: str
    measured: str
    low: float
    """The lowest of the rates that were measured …"""
    high: float
    """… and the highest."""
    least: float = 0.0
    most: float = 1.0
    """What they must lie between."""

    @property
    def holds(self) -> bool:
        return self.least <= self.low and self.high <= self.most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true", help="put the table into docs/diagnosis.md")
    given = parser.parse_args()
    rows = measured(200 if given.quick else 1500)
    table = as_table(rows)
    print(table)
    if given.write:
        text = PAGE.read_text()
        before, rest = text.split(MARKS[0])
        PAGE.write_text(before + MARKS[0] + table + MARKS[1] + rest.split(MARKS[1])[1])
    return int(not all(row.holds for row in rows))


def measured(runs: int, seed: int = 0) -> list[Row]:
    """All rows, each from so many simulated runs; chance of the simulation itself is allowed for."""
    parts = (intervals, learning, falling, standing, overfitting, best_of_many, promotion, power)
    return [row for part in parts for row in part(np.random.default_rng(seed), runs)]


def as_table(rows: Sequence[Row]) -> str:
    lines = [f"| {r.said} | {r.where} | {r.promised} | {r.measured} |" for r in rows]
    return "\n".join(["| statement | case | promised | measured |", "|---|---|---|---|", *lines, ""])


def slack(rate: float, runs: int) -> float:
    """Three standard errors of a rate that was measured on so many runs."""
    return 3 * (rate * (1 - rate) / runs) ** 0.5


def rates(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def at_most(said: str, where: str, rate: float, found: Sequence[float], runs: int) -> Row:
    """Of something that is said wrongly at this rate or less."""
    most = rate + slack(rate, runs)
    return Row(said, where, f"at most {rate:.2f}", rates(found), min(found), max(found), most=most)


def at_least(said: str, where: str, rate: float, found: Sequence[float], runs: int, promise: str = "") -> Row:
    least = rate - slack(rate, runs)
    return Row(said, where, promise or f"at least {rate:.2f}", rates(found), min(found), max(found), least=least)


# ---- intervals -----------------------------------------------------------------------------------------------------


def intervals(rng: Rng, runs: int) -> Iterator[Row]:
    """Coverage of means of 0 and 1, of several rollouts a task, of fractions, and of paired differences."""
    said, tasks = "95 % interval of a mean", (5, 10, 20, 50, 100, 200)
    for p in (0.5, 0.9, 0.97, 1.0):
        found = [_coverage(rng.binomial(1, p, (runs, n)), p) for n in tasks]
        yield at_least(said, f"rewards of 0 and 1, mean {p:g}, 5 to 200 tasks", LEVEL, found, runs)
    several, fractions = [], []
    for n in tasks[:-1]:
        chances = rng.beta(4.5, 0.5, (runs // 2, n))
        several.append(_coverage(rng.binomial(4, chances) / 4, 0.9))
        fractions.append(_coverage(np.round(rng.beta(0.3, 0.7, (runs // 2, n)), 1), 0.3))
    yield at_least(said, "4 rollouts of each of 5 to 100 tasks, mean 0.9", LEVEL, several, runs // 2)
    yield at_least(said, "fractions, mean 0.3, 5 to 100 tasks", LEVEL, fractions, runs // 2)
    paired = []
    for n in tasks[:-1]:
        pairs = rng.binomial(1, 0.9, (runs // 2, 2, n))
        found = [paired_difference(a.tolist(), b.tolist())[1] for a, b in pairs]
        paired.append(float(np.mean([low <= 0 <= high for low, high in found])))
    yield at_least("95 % interval of a paired gain", "no gain, mean 0.9, 5 to 100 tasks", LEVEL, paired, runs // 2)


def _coverage(values_RN: Any, mean: float) -> float:
    known: dict[tuple[float, ...], bool] = {}
    hits = 0
    for row in np.sort(np.asarray(values_RN, np.float64), axis=1).tolist():
        key = tuple(row)
        if key not in known:
            low, high = mean_interval(row, bounds=(0.0, 1.0))
            known[key] = low - 1e-9 <= mean <= high + 1e-9
        hits += known[key]
    return hits / len(values_RN)


# ---- verdicts on the reward of the steps ---------------------------------------------------------------------------


def progress(shape: str, steps: int) -> Any:
    """How much of its way the policy has come at each step, 0 to 1."""
    t = np.linspace(0.0, 1.0, steps)
    return {
        "flat": 0 * t,
        "line": t,
        "early": 1 - np.exp(-8 * t),
        "late": t**2,
        "jump": (t > 0.1).astype(np.float64),
        "tumble": np.where(t < 0.6, 1 - np.exp(-8 * t), 0.0),
    }[shape]


def series(
    rng: Rng, shape: str, batch: tuple[int, int], mean: float = 0.35, gain: float = 2.0, steps: int = STEPS
) -> list[float]:
    """Mean reward of each step; the logit of solving a task is its own plus `gain` times the progress."""
    tasks, group = batch
    logits = rng.normal(np.log(mean / (1 - mean)), 1.0, (steps, tasks)) + gain * progress(shape, steps)[:, None]
    return (rng.binomial(group, 1 / (1 + np.exp(-logits))).mean(axis=1) / group).tolist()


def ever(says: Callable[[list[float]], Any], rewards: list[float], first: int = FIRST) -> bool:
    """Whether it is said at a look after some step."""
    return any(says(rewards[:n]) for n in range(first, len(rewards) + 1))


def share(says: Callable[[list[float]], Any], drawn: Sequence[list[float]]) -> float:
    return float(np.mean([bool(says(one)) for one in drawn]))


def learning(rng: Rng, runs: int) -> Iterator[Row]:
    flat = {(b, m): [series(rng, "flat", b, m) for _ in range(runs // 6)] for b in BATCHES for m in (0.35, 0.9)}
    once = [share(has_risen, drawn) for drawn in flat.values()]
    each = [share(lambda r: ever(has_risen, r), drawn) for drawn in flat.values()]
    yield at_most("“It is learning”", f"nothing changes; one look after {STEPS} steps", LOOKED_RATE, once, runs // 6)
    yield at_most("“It is learning”", f"nothing changes; a look after each of {STEPS}", LOOKED_RATE, each, runs // 6)
    for shape in SHAPES:
        found = [share(has_risen, [series(rng, shape, b) for _ in range(runs // 6)]) for b in BATCHES]
        yield at_least("“It is learning”", f"{shape}, 0.38 → 0.78, {STEPS} steps", 0.4, found, runs // 6, "(power)")


def falling(rng: Rng, runs: int) -> Iterator[Row]:
    def says(rewards: list[float]) -> Any:
        return fall_of(rewards, 1.0)

    for shape, words in (("flat", "nothing changes"), ("early", "learns early")):
        found = [
            share(lambda r: ever(says, r), [series(rng, shape, b, m) for _ in range(runs // 6)])
            for b in BATCHES
            for m in (0.35, 0.9)
        ]
        yield at_most("`reward_fell`", f"{words}; a look after each of {STEPS}", LOOKED_RATE, found, runs // 6)
    found = [share(says, [series(rng, "tumble", b, gain=3.0) for _ in range(runs // 6)]) for b in BATCHES[1:]]
    yield at_least("`reward_fell`", "0.38 → 0.87 → 0.38, 8 × 4 or more", POWER, found, runs // 6, "(power)")


def standing(rng: Rng, runs: int) -> Iterator[Row]:
    for shape in SHAPES:
        found = [share(may_stand_still, [series(rng, shape, b) for _ in range(runs // 6)]) for b in BATCHES[1:]]
        where = f"{shape}, 0.38 → 0.78, {STEPS} steps, 8 × 4 or more"
        yield at_most("`not_rising`", where, 0.05, found, runs // 6)
    drawn = [[series(rng, "flat", b, steps=WATCHED_STEPS) for _ in range(runs // 6)] for b in BATCHES]
    found = [share(may_stand_still, one) for one in drawn]
    yield at_least("`not_rising`", f"nothing changes; one look after {WATCHED_STEPS}", 0.8, found, runs // 6, "(power)")


# ---- validations ---------------------------------------------------------------------------------------------------


def validations(rng: Rng, chances: Sequence[float], tasks: int) -> list[Validated]:
    found = []
    for chance in chances:
        won = int(rng.binomial(tasks, chance))
        found.append(Validated(won / tasks, *_interval_of(won, tasks)))
    return found


_INTERVALS: dict[tuple[int, int], tuple[float, float]] = {}


def _interval_of(won: int, tasks: int) -> tuple[float, float]:
    if (won, tasks) not in _INTERVALS:
        _INTERVALS[won, tasks] = mean_interval([1.0] * won + [0.0] * (tasks - won), bounds=(0.0, 1.0))
    return _INTERVALS[won, tasks]


def overfitting(rng: Rng, runs: int) -> Iterator[Row]:
    """A run of 52 steps that learns, validated after every fourth."""
    looks, train = 13, np.linspace(0.3, 0.9, 52)

    def said(chances: Sequence[float], tasks: int) -> bool:
        rewards = (train + rng.normal(0, 0.05, 52)).tolist()
        found = validations(rng, chances, tasks)
        return any(has_overfitted(rewards[: 4 * n], found[:n], 1.0) for n in range(3, looks + 1))

    for p in (0.4, 0.9):
        found = [float(np.mean([said([p] * looks, n) for _ in range(runs // 3)])) for n in (20, 40, 100)]
        where = f"validation stays at {p}; a look after each of {looks}, 20 to 100 tasks"
        yield at_most("`overfitting`", where, LOOKED_RATE, found, runs // 3)
    falls = [*np.linspace(0.4, 0.8, 6), *np.linspace(0.75, 0.35, 7)]
    found = [float(np.mean([said(falls, n) for _ in range(runs // 3)])) for n in (40, 100)]
    yield at_least("`overfitting`", "validation 0.4 → 0.8 → 0.35, 40 to 100 tasks", 0.7, found, runs // 3, "(power)")


def best_of_many(rng: Rng, runs: int) -> Iterator[Row]:
    looks = 7
    found = []
    for p, tasks in ((0.4, 20), (0.4, 100), (0.9, 20), (0.9, 100)):
        hits = 0
        for _ in range(runs):
            best = max(validations(rng, [p] * looks, tasks), key=lambda v: v.reward)
            low, high = widened(best.reward, (best.low, best.high), looks)
            hits += low <= p <= high
        found.append(hits / runs)
    yield at_least(
        "interval of the best validation", "7 validations of equal models, 20 to 100 tasks", LEVEL, found, runs
    )


# ---- prompts, and what tasks can show ------------------------------------------------------------------------------


def promotion(rng: Rng, runs: int) -> Iterator[Row]:
    needed, wrongly, held = threshold(PROMOTED, CANDIDATES), [], []
    for p in (0.5, 0.9):
        promoted = covered = 0
        for _ in range(runs):
            rewards = rng.binomial(1, p, (CANDIDATES + 1, 60)).astype(float)
            looks = [rewards[1:, :seen] - rewards[0, :seen] for seen in range(EVERY, 61, EVERY)]
            best = [seen[int(seen.mean(axis=1).argmax())].tolist() for seen in looks]
            promoted += any(evidence(one) >= needed for one in best)
            covered += all(least_gain(one, needed) <= 1e-9 for one in best[-1:])
        wrongly.append(promoted / runs)
        held.append(covered / runs)
    where = f"the best of {CANDIDATES} equal candidates; a look after each 12 of 60 tasks"
    yield at_most("promotion of a prompt", where, PROMOTED, wrongly, runs)
    yield at_least("“or more” of its gain", where, 1 - PROMOTED, held, runs)


def power(rng: Rng, runs: int) -> Iterator[Row]:
    """Whether the difference that is said to be visible is seen as often as that."""
    needed = threshold(PROMOTED, CANDIDATES)
    for said, detects in (
        ("“can show” of `agl eval`", is_positive),
        ("“can show” of `agl optimize`", lambda d: evidence(d) >= needed),
    ):
        found = []
        for tasks in (50, 200):
            for never_loses in (False, True):
                gain = visible_gain(tasks, detects, never_loses=never_loses)
                assert gain is not None
                found.append(_seen(rng, runs // 3, tasks, gain, never_loses, detects))
        where = "50 and 200 tasks; independent draws, and one that never loses"
        yield at_least(said, where, POWER - 0.1, found, runs // 3, f"about {POWER:g} or more")


def _seen(
    rng: Rng, runs: int, tasks: int, gain: float, never_loses: bool, detects: Callable[[Sequence[float]], bool]
) -> float:
    hits = 0
    for _ in range(runs):
        base = rng.random(tasks) < (1 - gain) / 2
        better = (
            base | (rng.random(tasks) < gain / (1 - base.mean())) if never_loses else rng.random(tasks) < (1 + gain) / 2
        )
        hits += detects((better.astype(float) - base).tolist())
    return hits / runs


if __name__ == "__main__":
    sys.exit(main())
