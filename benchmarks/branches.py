"""Credit by branches against GRPO and RLOO at equal sampled tokens, on a game of several turns.

    python benchmarks/branches.py [--steps 30] [--seeds 5] [--task NAME] [--quick] [--json] [--results FILE.jsonl]

Each run is that of `benchmarks/algorithms.py`, in a process of its own, two at a time. Continuations sample tokens,
too, so runs are compared by the mean reward of the steps within the same number of sampled tokens: that of the run that
sampled fewest. Ways that sample more in a step make fewer steps. The seconds of a step stand beside.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.algorithms import STUDENT, run

WAYS = {
    "RLOO": "RLOO()",
    "branches": "RLOO(credit='branches')",
    "branches, half the rollouts": "RLOO(credit='branches', group_size={half})",
    "branches, continuations not trained": "RLOO(credit='branches', branches={{'train': False}})",
}
STEPS = {"RLOO": 1.0, "branches": 0.4, "branches, half the rollouts": 0.7, "branches, continuations not trained": 0.4}
"""How many of the steps each way makes, which sample about as many tokens."""
HALF = {"bidding": 4, "eight questions": 3}
"""Half of the siblings that the task's runs have."""
SUMMED = {"eight questions": "rollout_return='sum'"}
"""Settings of a task whose rollouts are rewarded on the way."""
SECONDS = ("sampling_seconds", "learning_seconds")


def sampled(row: dict[str, Any]) -> int:
    """The tokens that a step sampled, those of continuations included."""
    return int(row["tokens"] + row.get("branches/tokens", 0))


def within(rows: list[dict[str, Any]], tokens: int) -> dict[str, float]:
    """The mean reward of the steps within so many tokens, and of the last three of them."""
    taken, used = [], 0
    for row in rows:
        used += sampled(row)
        if taken and used > tokens:
            break
        taken.append(row["reward"])
    return {"steps": len(taken), "mean": statistics.fmean(taken), "last": statistics.fmean(taken[-3:])}


def interval(values: list[float]) -> str:
    """Student's 95 % interval of the mean over the seeds; nothing for one seed."""
    if len(values) not in STUDENT:
        return ""
    half = STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values) - half:.3f} to {statistics.fmean(values) + half:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--task", default="bidding", choices=[*HALF])
    parser.add_argument("--results", type=Path, help="keep finished runs here, and do not repeat them")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    steps, seeds = (2, 1) if options.quick else (options.steps, options.seeds)
    lines = options.results.read_text().splitlines() if options.results and options.results.exists() else []
    done = {(r["way"], r["seed"]): r["rows"] for r in map(json.loads, lines) if r["steps"] == steps}
    wanted = [(way, seed) for seed in range(seeds) for way in WAYS if (way, seed) not in done]

    def one(asked: tuple[str, int]) -> None:
        way, seed = asked
        algorithm = WAYS[way].format(half=HALF[options.task])[:-1] + f", {SUMMED.get(options.task, '')})"
        found = run(algorithm.replace("(, ", "("), max(2, round(steps * STEPS[way])), seed, task=options.task)
        rows = [r for r in found if r.get("step") and "reward" in r]
        kept = [{k: r[k] for k in ("reward", "tokens", "branches/tokens", *SECONDS) if k in r} for r in rows]
        done[asked] = kept
        if options.results:
            with options.results.open("a") as file:
                file.write(json.dumps({"way": way, "seed": seed, "steps": steps, "rows": kept}) + "\n")

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(one, wanted))
    tokens = min(sum(map(sampled, rows)) for rows in done.values())
    table = Table("credit", "seeds", "steps", "mean reward", "95 %", "last steps", "95 %", "seconds a step", box=None)
    found = {}
    for way in WAYS:
        runs = [rows for (name, _), rows in done.items() if name == way]
        figures = [within(rows, tokens) for rows in runs]
        seconds = statistics.median(sum(r[name] for name in SECONDS) for rows in runs for r in rows)
        of = {name: [f[name] for f in figures] for name in ("steps", "mean", "last")}
        found[way] = {**of, "seconds": seconds}
        spans = [interval(of[name]) for name in ("mean", "last")]
        cells = [f"{statistics.fmean(of[name]):.3f}" for name in ("mean", "last")]
        shown = (cells[0], spans[0], cells[1], spans[1], f"{seconds:.1f}")
        table.add_row(way, str(len(runs)), f"{statistics.fmean(of['steps']):.0f}", *shown)
    if options.json:
        print(json.dumps({"tokens": tokens, "task": options.task, "ways": found}))
        return
    console = Console(width=130)
    console.print(f"{options.task}, within {tokens:,} sampled tokens")
    console.print(table)


if __name__ == "__main__":
    main()
