"""Make `tests/algorithm/reward_series.json`: the rewards per step of healthy and of dead runs.

    python scripts/reward_series.py --healthy runs/calc-* --dead runs/zero-*

Real runs are read from their folders. The others are simulated: tasks of different difficulty, groups of siblings, and
a policy whose chance to solve a task rises in one of four ways, or not at all. Test `test_trend.py` reads the file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

OUT = Path(__file__).parents[1] / "tests" / "algorithm" / "reward_series.json"
SHAPES = ("line", "early", "late", "jump")
SIMULATED = 100
STEPS = 48


def progress(shape: str, steps: int) -> NDArray[np.float64]:
    """How much of its way the policy has come at each step, 0 to 1."""
    t = np.linspace(0.0, 1.0, steps)
    return {
        "line": t,
        "early": 1 - np.exp(-8 * t),
        "late": t**2,
        "jump": (t > 0.1).astype(np.float64),
    }[shape]


def simulate(rng: np.random.Generator, gain: float, shape: str, tasks: int, group: int, steps: int) -> list[float]:
    """Mean reward of each step; the logit of solving a task is its own plus `gain` times the progress."""
    rewards: list[float] = []
    for done in progress(shape, steps):
        logits = rng.normal(-0.7, 1.0, tasks) + gain * done
        solved = rng.random((tasks, group)) < (1 / (1 + np.exp(-logits)))[:, None]
        rewards.append(round(float(solved.mean()), 4))
    return rewards


def simulated(rng: np.random.Generator, number: int, *, dead: bool) -> dict[str, Any]:
    tasks, group = [(8, 4), (8, 8), (12, 8), (16, 8)][number % 4]
    shape = SHAPES[number // 4 % 4]
    gain = 0.0 if dead else float(rng.uniform(1.5, 4.0))
    rewards = simulate(rng, gain, shape, tasks, group, STEPS)
    return {"of": f"simulated: {tasks} × {group}, {shape}, gain {gain:.2f}", "rewards": rewards}


def recorded(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"of": f"recorded: {folder.name}", "rewards": [round(m["reward"], 4) for m in lines if "reward" in m]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--healthy", type=Path, nargs="*", default=[])
    parser.add_argument("--dead", type=Path, nargs="*", default=[])
    given = parser.parse_args()
    rng = np.random.default_rng(11)
    runs = {
        name: [*map(recorded, folders), *(simulated(rng, n, dead=name == "dead") for n in range(SIMULATED))]
        for name, folders in (("healthy", given.healthy), ("dead", given.dead))
    }
    OUT.write_text("{\n" + ",\n".join(f'"{name}": [\n{_rows(rows)}\n]' for name, rows in runs.items()) + "\n}\n")
    print({name: len(rows) for name, rows in runs.items()}, "->", OUT)


def _rows(rows: list[dict[str, Any]]) -> str:
    return ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)


if __name__ == "__main__":
    main()
