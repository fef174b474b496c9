"""Prompts and weights under one budget: `Joint` beside prompts alone and weights alone, at the same number of rollouts.

The model is the small one that ships; GRPO really trains it. A third of the tasks are the calculator's own, which its
weights decide. The others are sales in a shop whose price stands in the prompt, and nowhere else: with the wrong one an
answer is wrong however well the model calculates. The critic is no language model: it tries the prices of a list.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agentlightning as agl
from agentlightning.algorithm.joint import Arm
from agentlightning.metrics import SilentConsole
from examples.calc.calc_agent import calc_agent
from examples.calc.tasks import NAMES, THINGS, make_tasks

PRICE, PRICES = 17, (8, 11, 14, 17)
TEMPLATE = "{{name}} buys {{count}} {{things}} for {price} dollars each and pays {{paid}} dollars. How much is left?"
FIRST_PROMPT = TEMPLATE.format(price=2)
ARMS: dict[str, tuple[Arm, ...]] = {"Joint": ("prompt", "weights"), "prompt": ("prompt",), "weights": ("weights",)}
TRAIN, VAL = 600, 60


@agl.rollout
async def shop_agent(task: dict[str, Any], llm: agl.LLM, prompt_template: agl.PromptTemplate) -> float:
    question = task["question"] if "question" in task else prompt_template.format(**task["sale"])
    return await calc_agent({"question": question, "answer": task["answer"]}, llm)


def tasks_of(count: int, seed: int) -> list[dict[str, Any]]:
    """A calculation, two sales, and so on."""
    rng = random.Random(f"shop {seed}")
    plain, _ = make_tasks(count // 3, 0, seed=seed + 100)
    return [task for question in plain for task in (question, _sale(rng), _sale(rng))]


def _sale(rng: random.Random) -> dict[str, Any]:
    count = rng.randint(2, 20)
    paid = rng.randint(count * PRICE, 400)
    return {
        "sale": {"name": rng.choice(NAMES), "things": rng.choice(THINGS), "count": count, "paid": paid},
        "answer": paid - count * PRICE,
    }


class Guesses:
    """Has what the optimisers call on a client: it proposes one price after the other, from one that a seed says."""

    def __init__(self, seed: int) -> None:
        self._next = seed
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(self, *, messages: list[dict[str, str]], **_: Any) -> dict[str, Any]:
        text = "The price may be wrong."
        if "<new_template>" in messages[-1]["content"]:
            text = f"<new_template>{TEMPLATE.format(price=PRICES[self._next % len(PRICES)])}</new_template>"
            self._next += 1
        return {"choices": [{"message": {"content": text}}], "usage": {"prompt_tokens": 0, "completion_tokens": 0}}


def improve(arm: str, seed: int, budget: int, run_dir: Path) -> dict[str, Any]:
    """One run; what its last round left."""
    joint = agl.Joint(
        prompt=agl.APO(
            Guesses(seed),
            beam_width=1,
            branch_factor=len(PRICES),
            beam_rounds=1,
            val_batch_size=VAL,
            gradient_batch_size=4,
            significance=0.2,
            seed=seed,
        ),
        weights=agl.GRPO(
            model="calc", tasks_per_step=12, group_size=8, learning_rate=4e-4, minibatches=2, max_context=512, seed=seed
        ),
        budget_rollouts=budget,
        steps_per_round=3,
        rollouts_per_round=400,
        patience=2,
        arms=ARMS[arm],
    )
    trainer = agl.Trainer(
        algorithm=joint,
        initial_resources={"prompt_template": agl.PromptTemplate(template=FIRST_PROMPT)},
        console=SilentConsole(),
        concurrency=96,
        run_dir=run_dir,
    )
    began = time.monotonic()
    trainer.fit(shop_agent, tasks_of(TRAIN, 1), tasks_of(VAL, 2))
    lines = [json.loads(line) for line in (run_dir / "joint.jsonl").read_text().splitlines()]
    return {
        "arm": arm,
        "seed": seed,
        "val_reward": lines[-1]["val_reward"],
        "rollouts": VAL + sum(line["rollouts"] for line in lines),
        "rounds": "".join(line["arm"][0] for line in lines),
        "price": PRICE if str(PRICE) in joint.get_best_prompts()["prompt_template"].template else None,
        "seconds": round(time.monotonic() - began),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=2200, help="rollouts of each run, validations included")
    parser.add_argument("--quick", action="store_true", help="one seed, and a third of the rollouts")
    parser.add_argument("--json", type=Path, help="write the results here, too")
    given = parser.parse_args()
    seeds, budget = (1, given.budget // 3) if given.quick else (given.seeds, given.budget)
    found: list[dict[str, Any]] = []
    print(f"| seed | improves | reward on {VAL} validation tasks | rollouts | rounds | seconds |")
    print("|---|---|---|---|---|---|")
    for seed in range(seeds):
        for arm in ARMS:
            with tempfile.TemporaryDirectory() as folder:
                row = improve(arm, seed, budget, Path(folder) / "run")
            found.append(row)
            values = (seed, arm, f"{row['val_reward']:.2f}", row["rollouts"], row["rounds"], row["seconds"])
            print("| " + " | ".join(map(str, values)) + " |", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
