"""Whether a small model learns a game of Gymnasium: its FrozenLake, played through `gym:`, with several seeds.

    python benchmarks/lake.py [--seeds 3] [--steps 40] [--quick] [--json]

The model that ships knows arithmetic, and has never said "left". SFT shows it 400 episodes of random play, of which one
in twenty reaches the goal; GRPO learns the way from there. The lake is three fields wide with a hole in the middle, and
an episode has eight steps, where the way takes four.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import agentlightning as agl
from agentlightning.environments.gym import GymEnvironment
from agentlightning.metrics import SilentConsole, read_metrics

ACTIONS = ["left", "down", "right", "up"]
LAKE = {"is_slippery": False, "desc": ["SFF", "FHF", "FFG"], "max_episode_steps": 8}


def lake() -> GymEnvironment:
    return GymEnvironment("FrozenLake-v1", tasks=64, val_tasks=64, actions=ACTIONS, answer_tokens=8, **LAKE)


def random_play(environment: GymEnvironment, seed: int) -> dict[str, Any]:
    """An episode of random actions as a conversation."""
    chosen, over = random.Random(seed), False
    with closing(environment.make()) as made:
        seen, _ = made.reset(seed=seed)
        messages = [{"role": "system", "content": environment.instructions}]
        while not over:
            word = chosen.choice(ACTIONS)
            said = [("user", environment.shown(made, seen)), ("assistant", word)]
            messages += [{"role": role, "content": content} for role, content in said]
            seen, _, terminated, truncated, _ = made.step(environment.action(word))
            over = terminated or truncated
    return {"messages": messages}


def trained(algorithm: agl.GRPO, run: Path, *work: Any) -> Path:
    return agl.Trainer(algorithm=algorithm, run_dir=run, console=SilentConsole()).fit(*work).run_dir


def measured(start: Path, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """The share of 64 episodes that reach the goal, before and after, and what was paid at each step."""
    environment = lake()
    algorithm = agl.GRPO(model=str(start), steps=steps, group_size=16, tasks_per_step=4, val_every=steps, seed=seed)
    run = trained(algorithm, folder / f"seed-{seed}", environment.agent, environment.tasks(), environment.val_tasks())
    rows = list(read_metrics(run / "metrics.jsonl"))
    validated = [row["val_reward"] for row in rows if row.get("val_reward") is not None]
    return {"seed": seed, "before": validated[0], "after": validated[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many runs, with the seeds 0, 1, …")
    parser.add_argument("--steps", type=int, default=40, help="of GRPO")
    parser.add_argument("--quick", action="store_true", help="one seed, 40 episodes shown once, two steps")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, too")
    options = parser.parse_args()
    seeds, steps, episodes, epochs = (1, 2, 40, 1) if options.quick else (options.seeds, options.steps, 400, 12)
    with tempfile.TemporaryDirectory(prefix="agl-lake-") as name:
        folder = Path(name)
        chats = [random_play(lake(), seed) for seed in range(episodes)]
        shown = agl.SFT(model="calc", source="chats", epochs=epochs, learning_rate=1e-3, tasks_per_step=8)
        start = trained(shown, folder / "shown", None, chats)
        found = [measured(start, seed, steps, folder) for seed in range(seeds)]
    table = Table("seed", "goal reached before", f"after {steps} steps")
    for one in found:
        table.add_row(str(one["seed"]), f"{one['before']:.2f}", f"{one['after']:.2f}")
    Console().print(table)
    if options.json:
        print(json.dumps({"seeds": found}))


if __name__ == "__main__":
    main()
