"""Train many short runs on the shipped model, well ones and sick ones, and keep the metrics of their steps.

    python scripts/record_runs.py --runs 4     (the next four that are not in the file yet; a minute each)
    python scripts/record_runs.py --results runs.jsonl     (runs that benchmarks/algorithms.py --results has made)

Each line of `tests/algorithm/recorded_runs.jsonl` is one real run: its name, what was done to it, its settings, and one
list per metric. What is well is not decided by what the verdicts read: a healthy run is one that was left alone and
whose reward on held-out tasks rose by `LEARNED` or more; one that was left alone and did not learn is "unclear", and no
test reads it. The sick ones have a learning rate of 0, a reward by chance, or a reward that siblings share.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.metrics import SilentConsole
from agentlightning.trainer.example import load_example

OUT = Path(__file__).parents[1] / "tests" / "algorithm" / "recorded_runs.jsonl"
LEARNED = 0.1
STEPS = 30
SICK_EVERY = 4
"""Every fourth run is a sick one."""
HELD_OUT = 48
METRICS = (
    *("reward", "val_reward", "updates", "learning_rate", "entropy", "clip_fraction", "kl_old", "grad_norm", "loss"),
    *("logprob_gap_max", "sync_gap", "halvings", "correction_mean", "corrected_to_zero", "effective_sample_size"),
)
ALGORITHMS = (
    *("GRPO", "DrGRPO", "RLOO", "DAPO", "CISPO", "REINFORCE", "GSPO", "PPO", "ReinforcePP", "ReinforcePPBaseline"),
)
AGENTS = ("calculator", "partial", "easy")
SICKNESSES = ("rate 0", "chance", "flat")
SIZES = ((6, 8), (8, 6), (12, 4))
"""tasks_per_step, group_size"""

calc: Any = load_example("calc", "calc_agent")
recipe: Any = load_example("calc", "recipe")


def plan(number: int) -> dict[str, Any]:
    """What run `number` is; every setting follows from the number."""
    rng = random.Random(f"recorded run {number}")
    sick = number % SICK_EVERY == SICK_EVERY - 1
    nth = number // SICK_EVERY if sick else number - number // SICK_EVERY
    tasks_per_step, group_size = (12, 4) if sick else SIZES[nth // 2 % len(SIZES)]
    lora = None if sick or nth % 5 != 4 else rng.choice((8, 16))
    rate = rng.choice((1e-3, 2e-3)) if lora else rng.choice((None, 1e-4, 2e-4, 3e-4))
    return {
        "of": f"run {number}",
        "kind": SICKNESSES[nth % len(SICKNESSES)] if sick else "healthy",
        "agent": AGENTS[nth % len(AGENTS)],
        "algorithm": "GRPO" if sick else ALGORITHMS[nth % len(ALGORITHMS)],
        "settings": {
            **{"seed": number, "steps": STEPS, "tasks_per_step": tasks_per_step, "group_size": group_size},
            **({"lora_rank": lora} if lora else {}),
            **({"learning_rate": rate} if rate else {}),
            **({"schedule": "linear"} if rng.random() < 0.4 else {}),
        },
    }


def make_agent(run: Mapping[str, Any]) -> Any:
    """The agent of a run, with its reward as the run's sickness wants it."""
    chance = random.Random(run["of"])

    @agl.rollout
    async def agent(task: dict[str, Any], llm: agl.LLM) -> float:
        messages: list[Any] = [
            {"role": "system", "content": calc.SYSTEM_PROMPT},
            {"role": "user", "content": task["question"]},
        ]
        client = calc.client.with_options(base_url=llm.endpoint, api_key=llm.api_key).chat.completions
        reward, used = 0.0, 0
        for _ in range(calc.MAX_TURNS):
            response = await client.create(model=llm.model, messages=messages, tools=[calc.CALC_TOOL], max_tokens=64)
            message = response.choices[0].message
            if not message.tool_calls:
                reward = calc.score(message.content or "", task["answer"])
                break
            messages.append(message)
            for call in message.tool_calls:
                result = calc.calculate(call.function.arguments)
                used += not result.startswith("Error")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if run["kind"] == "chance":
            return float(chance.random() < 0.4)
        if run["kind"] == "flat":
            return float(task["answer"] % 2)
        return 0.7 * reward + 0.3 * bool(used) if run["agent"] == "partial" else reward

    return agent


def make_tasks(run: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Training and held-out tasks; the easy ones have a single operation."""
    train, held_out = recipe.train_tasks(), recipe.val_tasks()
    if run["agent"] == "easy":
        train, held_out = (
            [t for t in tasks if sum(map(str.isdigit, t["question"])) <= 4] for tasks in (train, held_out)
        )
    return train, held_out[:HELD_OUT]


def train(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The metrics of the run's steps."""
    settings = {**run["settings"], "max_context": 512, "val_every": STEPS, "save_every": STEPS}
    if run["kind"] != "healthy":
        settings |= {"preflight": "warn", "flat_steps": 0}
    if run["kind"] == "rate 0":
        settings["learning_rate"] = 0.0
    algorithm = getattr(agl, run["algorithm"])(model="calc", **settings)
    tasks, held_out = make_tasks(run)
    with tempfile.TemporaryDirectory() as folder:
        trainer = agl.Trainer(algorithm=algorithm, run_dir=Path(folder, "run"), console=SilentConsole())
        result = trainer.fit(make_agent(run), tasks, held_out)
    if result.stopped:
        sys.exit(f"{run['of']} was stopped and is not kept.")
    return [dict(row) for row in result.metrics]


def line_of(run: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A line of the file. Metrics are rounded to three digits; a run that was left alone must have learned."""
    steps = [row for row in rows if row.get("step")]
    columns = {name: [_rounded(row.get(name)) for row in steps] for name in METRICS}
    validated = [row["val_reward"] for row in rows if row.get("val_reward") is not None]
    kind = run["kind"]
    if kind == "healthy" and validated[-1] - validated[0] < LEARNED:
        kind = "unclear"
    metrics = {name: column for name, column in columns.items() if any(value is not None for value in column)}
    held_out = [_rounded(validated[0]), _rounded(validated[-1])]
    return {**run, "kind": kind, "held_out": held_out, "metrics": metrics}


def _rounded(value: Any) -> float | int | None:
    return None if value is None else int(value) if value == int(value) else float(f"{value:.3g}")


OF_TASK: Mapping[str, Mapping[str, Any]] = {
    "calculator": {**recipe.SETTINGS, "tasks_per_step": 4},
    "bidding": {"tasks_per_step": 4, "group_size": 8, "learning_rate": 1e-3},
}
"""What benchmarks/algorithms.py trains with."""
SHOWN = ("tasks_per_step", "group_size", "minibatches", "learning_rate", "schedule")


def lines_of(results: Path) -> list[dict[str, Any]]:
    """The runs of benchmarks/algorithms.py that are long enough for a verdict, as lines of the file."""
    found: list[dict[str, Any]] = []
    for asked, rows in ((one["asked"], one["rows"]) for one in map(json.loads, results.read_text().splitlines())):
        settings = OF_TASK.get(asked["task"])
        if settings is None or asked["steps"] < STEPS:
            continue
        shown = {name: settings[name] for name in SHOWN if name in settings}
        run = {
            "of": f"{asked['task']}, {asked['algorithm']}, seed {asked['seed']}",
            "kind": "healthy",
            "agent": asked["task"],
            "algorithm": asked["algorithm"].split("(")[0],
            "settings": {"seed": asked["seed"], "steps": asked["steps"], **shown},
        }
        found.append(line_of(run, rows))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one, for two at once")
    parser.add_argument("--results", type=Path, help="take runs from here instead")
    given = parser.parse_args()
    have = {json.loads(line)["of"] for line in OUT.read_text().splitlines()} if OUT.exists() else set()
    if given.results is not None:
        for line in lines_of(given.results):
            if line["of"] not in have:
                _append(line)
        return
    todo = (run for run in map(plan, range(given.first, 1000)) if run["of"] not in have)
    for _, run in zip(range(given.runs), todo, strict=False):
        _append(line_of(run, train(run)))


def _append(line: Mapping[str, Any]) -> None:
    with OUT.open("a") as file:
        file.write(json.dumps(line, separators=(",", ":")) + "\n")
    print(line["of"], line["kind"], line["algorithm"], line["agent"], line["held_out"], flush=True)


if __name__ == "__main__":
    main()
