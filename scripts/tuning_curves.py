"""Reinforcement jobs through OpenAI's client, one for each seed, and the curves of their rewards as SVG, for the docs.

    python scripts/tuning_curves.py docs/assets/fine-tuning-curve.svg [--seeds 3]

The calculator model learns to answer questions of one operation with the right call; a Python grader compares.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai

from agentlightning import load_example
from agentlightning.finetuning.app import ServerSettings, TrainingServer
from agentlightning.finetuning.recipe import BaseModel
from agentlightning.metrics.svg import curve_svg

SOURCE = """
import json
def grade(sample, item):
    calls = sample["output_tools"]
    return float(bool(calls) and json.loads(calls[0]["function"]["arguments"]) == item["call"])
"""
TRAINED, HELD_OUT, BATCH, EVERY = 320, 80, 8, 8


def items(count: int) -> list[dict[str, Any]]:
    """Questions of one operation, with the call that answers each."""
    tasks, calc = load_example("calc", "tasks"), load_example("calc", "calc_agent")
    rng, found = random.Random(7), list[dict[str, Any]]()
    while len(found) < count:
        problem = tasks.make_problem(rng)
        a, op, b = problem.tree
        if isinstance(a, int) and isinstance(b, int):
            ask = [{"role": "system", "content": calc.SYSTEM_PROMPT}, {"role": "user", "content": problem.question}]
            found.append({"messages": ask, "tools": [calc.CALC_TOOL], "call": {"a": a, "op": op, "b": b}})
    return found


def jsonl(rows: Sequence[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


async def rewards(client: openai.AsyncOpenAI, files: Sequence[str], seed: int) -> list[tuple[int, float]]:
    """The mean reward of the held-out items, by step."""
    hyper: Any = {"batch_size": BATCH, "eval_interval": EVERY, "eval_samples": 2}
    grader: Any = {"type": "python", "name": "call", "source": SOURCE}
    method: Any = {"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": hyper}}
    train, held_out = files
    job = await client.fine_tuning.jobs.create(
        model="calc", training_file=train, validation_file=held_out, method=method, seed=seed
    )
    while job.status not in ("succeeded", "failed", "cancelled"):
        await asyncio.sleep(1)
        job = await client.fine_tuning.jobs.retrieve(job.id)
    if job.status != "succeeded":
        raise RuntimeError(str(job.error))
    said = [event.data async for event in client.fine_tuning.jobs.list_events(job.id) if event.type == "metrics"]
    rows: list[Any] = sorted(said, key=lambda row: row["step"])  # pyright: ignore[reportIndexIssue, reportOptionalSubscript]
    return [(row["step"], row["full_valid_mean_reward"]) for row in rows if "full_valid_mean_reward" in row]


async def curves(seeds: int) -> dict[str, list[tuple[int, float]]]:
    with tempfile.TemporaryDirectory() as folder:
        settings = ServerSettings(port=0, max_context=512)
        server = TrainingServer(Path(folder) / "served", {"calc": BaseModel("calc", "calc")}, settings)
        await server.start()
        try:
            async with openai.AsyncOpenAI(base_url=server.endpoint, api_key="any") as client:
                found, ids = items(TRAINED + HELD_OUT), list[str]()
                for rows in (found[:TRAINED], found[TRAINED:]):
                    ids.append((await client.files.create(file=("f.jsonl", jsonl(rows)), purpose="fine-tune")).id)
                return {f"seed {seed}": await rewards(client, ids, seed) for seed in range(seeds)}
        finally:
            await server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    found = asyncio.run(curves(given.seeds))
    for name, points in found.items():
        print(name, " ".join(f"{step}: {value:.3f}" for step, value in points))
    head, mark, rest = curve_svg(found).partition(">")
    given.out.write_text(f'{head}{mark}<rect width="100%" height="100%" fill="white"/>{rest}\n')  # pages may be dark


if __name__ == "__main__":
    main()
