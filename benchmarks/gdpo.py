"""GDPO against the weighted sum, on two rewards of which one is loud and the other quiet.

    python benchmarks/gdpo.py [--steps 150] [--seeds 5] [--quick] [--json]

A policy names one of four cards. A judge whose mark is mostly noise (deviation 1) pays 1 for a high card: the part
`high`. A rule pays 0.05 for an even one: the part `even`. One card has both. Weights are 1, as if nobody knew the
scales; `by hand` is the sum with the weight that makes both parts about equally large. The policy is four logits, so
what a run comes to is known exactly; its advantages are those that a training run has (`algorithm.credit`). Shown is
how probable each is in the end, with the 95 % interval of the mean over seeds (Student's t).
"""

from __future__ import annotations

import argparse
import json
import statistics

import numpy as np
from rich.console import Console
from rich.table import Table

from agentlightning.algorithm.credit.assignment import credit
from agentlightning.algorithm.credit.units import CreditRule
from agentlightning.algorithm.episode import Earned, Episode
from agentlightning.types import Attempt, Call, CallInfo, Outcome, Rollout

HIGH, EVEN = np.array([0.0, 0.0, 1.0, 1.0]), np.array([0.0, 1.0, 0.0, 1.0])
"""Which cards have what."""
QUIET = 0.05
"""What the rule pays."""
GROUPS, SIBLINGS, RATE = 8, 8, 0.1
ARMS = {
    "weighted sum": ("grpo", {"high": 1.0, "even": 1.0}),
    "GDPO": ("gdpo", {"high": 1.0, "even": 1.0}),
    "weighted sum, by hand": ("grpo", {"high": 1.0, "even": 40.0}),
}
T_95 = {3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26, 20: 2.09}
"""The 0.975 quantile of Student's t, by the number of seeds."""


def episode(group: int, number: int, parts: dict[str, float], weights: dict[str, float]) -> Episode:
    """A rollout of one call of one token."""
    name = f"{group}-{number}"
    info = CallInfo(
        call_id=name,
        response_id=name,
        rollout_id=name,
        attempt_id="a",
        choice=0,
        policy="policy",
        trained=True,
        agent=None,
        parent_call_id=None,
        model="policy",
        dialect="chat",
        finish_reason="stop",
        start_time=0.0,
        end_time=0.0,
        temperature=1.0,
    )
    zeros = np.zeros(1, np.float32)
    call = Call(info, np.zeros(1, np.int32), np.ones(1, np.int32), zeros, zeros, ())
    value = sum(weights[part] * earned for part, earned in parts.items())
    attempt = Attempt(rollout_id=name, attempt_id="a", sequence_id=1, start_time=0.0, outcome=Outcome.OK)
    rollout = Rollout(rollout_id=name, input=group, start_time=0.0, metadata={"group": group})
    return Episode(rollout, attempt, value, [call], [Earned(value, 0, parts=parts)])


def probabilities(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max())
    return shares / shares.sum()


def run(advantage: str, weights: dict[str, float], steps: int, seed: int) -> dict[str, float]:
    """Plain policy gradient; how probable high and even cards are in the end."""
    rng, logits = np.random.default_rng(seed), np.zeros(len(HIGH))
    rule = CreditRule(advantage=advantage, weights=weights)
    for _ in range(steps):
        p = probabilities(logits)
        cards = rng.choice(len(p), (GROUPS, SIBLINGS), p=p)
        marks = HIGH[cards] + rng.normal(0, 1, cards.shape)
        episodes = [
            episode(g, n, {"high": float(marks[g, n]), "even": QUIET * float(EVEN[cards[g, n]])}, weights)
            for g in range(GROUPS)
            for n in range(SIBLINGS)
        ]
        for batch in credit(episodes, rule):
            for one in batch:
                group, number = map(int, one.call.info.call_id.split("-"))
                chosen = np.eye(len(p))[cards[group, number]]
                logits += RATE * float(one.advantages[0]) * (chosen - p) / cards.size
    p = probabilities(logits)
    return {"high": float(p @ HIGH), "even": float(p @ EVEN), "both": float(p @ (HIGH * EVEN))}


def cell(values: list[float]) -> str:
    mean = statistics.mean(values)
    if len(values) not in T_95:
        return f"{mean:.2f}"
    return f"{mean:.2f} ± {T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one seed, ten steps")
    parser.add_argument("--json", action="store_true", help="end with the figures as one line of JSON")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.seeds = 10, 1
    figures: dict[str, dict[str, list[float]]] = {}
    for name, (advantage, weights) in ARMS.items():
        runs = [run(advantage, weights, arguments.steps, seed) for seed in range(arguments.seeds)]
        figures[name] = {key: [one[key] for one in runs] for key in runs[0]}
    shown = Table("rewards", "high", "even", "both", title=f"{arguments.steps} steps, {arguments.seeds} seeds")
    for name, found in figures.items():
        shown.add_row(name, *(cell(values) for values in found.values()))
    Console().print(shown)
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
