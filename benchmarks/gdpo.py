"""GDPO against the weighted sum, on two rewards of which one is loud and the other quiet.

    python benchmarks/gdpo.py [--model] [--steps 150] [--seeds 5] [--quick] [--json]

A policy names one of four cards. A judge whose mark is mostly noise (deviation 1) pays 1 for a high card: the part
`high`. A rule pays 0.05 for an even one: the part `even`. One card has both. Weights are 1, as if nobody knew the
scales; `by hand` is the sum with the weight that makes both parts about equally large. The policy is four logits, so
what a run comes to is known exactly; its advantages are those that a training run has (`algorithm.credit`). Shown is
how probable each is in the end, with the 95 % interval of the mean over seeds (Student's t).

`--model` trains a language model in place of the logits, through the gateway, the store and the backend: that of
`scratch.py`, with 0.2 million random weights. It answers a message of three digits with one: five and more is high.
Shown is how often it names each over the last fifth of 60 steps; the parts that count that have no weight.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path

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
LEARNING_RATE = 1e-3
"""Of the language model."""
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


def train(advantage: str, weights: dict[str, float], steps: int, seed: int) -> dict[str, float]:
    """GRPO of a small model; how often it named high and even digits in the last fifth of the steps."""
    from openai import AsyncOpenAI

    import agentlightning as agl
    from agentlightning.metrics import SilentConsole
    from benchmarks.scratch import GAMES, make_model

    client = AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="set for each rollout")
    noise = random.Random(seed)

    @agl.rollout
    async def player(task: list[int], llm: agl.LLM) -> None:
        chat = client.with_options(base_url=llm.endpoint, api_key=llm.api_key).chat.completions
        message = {"role": "user", "content": " ".join(map(str, task))}
        answer = await chat.create(model=llm.model, messages=[message], max_tokens=1)  # pyright: ignore
        said = answer.choices[0].message.content or ""
        high, even = said in {*"56789"}, said in {*"02468"}
        parts = {"high": high + noise.gauss(0, 1), "even": QUIET * even}
        counted = {"is_high": float(high), "is_even": float(even), "is_both": float(high and even)}
        agl.emit_reward({**parts, **counted}, primary_key="high")

    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", seed)
        algorithm = agl.GRPO(
            model=str(model), steps=steps, tasks_per_step=GROUPS, group_size=SIBLINGS, seed=seed, max_context=64,
            save_every=1000, learning_rate=LEARNING_RATE, renderer="default", advantage=advantage,
            reward_weights=weights,
        )  # fmt: skip
        trainer = agl.Trainer(algorithm=algorithm, run_dir=f"{folder}/run", concurrency=64, console=SilentConsole())
        rows = [row for row in trainer.fit(player, GAMES["copy"].tasks).metrics if row.get("reward") is not None]
    last = rows[-max(steps // 5, 1) :]
    return {part: statistics.fmean(row[f"reward/is_{part}"] for row in last) for part in ("high", "even", "both")}


def cell(values: list[float]) -> str:
    mean = statistics.mean(values)
    if len(values) not in T_95:
        return f"{mean:.2f}"
    return f"{mean:.2f} ± {T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, help="150, or 60 with --model")
    parser.add_argument("--model", action="store_true", help="train a small language model in place of four logits")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one seed, ten steps")
    parser.add_argument("--json", action="store_true", help="end with the figures as one line of JSON")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.seeds = 3 if arguments.model else 10, 1
    steps, play = arguments.steps or (60 if arguments.model else 150), train if arguments.model else run
    figures: dict[str, dict[str, list[float]]] = {}
    for name, (advantage, weights) in ARMS.items():
        runs = [play(advantage, weights, steps, seed) for seed in range(arguments.seeds)]
        figures[name] = {key: [one[key] for one in runs] for key in runs[0]}
    shown = Table("rewards", "high", "even", "both", title=f"{steps} steps, {arguments.seeds} seeds")
    for name, found in figures.items():
        shown.add_row(name, *(cell(values) for values in found.values()))
    Console().print(shown)
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
