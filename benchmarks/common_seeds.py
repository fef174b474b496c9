"""How much of the difference between two prompts, or two checkpoints, is chance when both draw alike, and when not.

    python benchmarks/common_seeds.py [RUN ...] [--tasks 150] [--repeats 3] [--quick] [--json]

The calculator agent with four wordings of its system prompt on the model that ships, each pair on the same tasks; with
folders of runs or checkpoints, each against its base, too. The table has the variance of the difference of a task's
rewards with common seeds (`sampling_seed`, as `agl eval` and `agl optimize` use), the same with independent draws, and
their ratio: so much fewer tasks show the same gain.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import agentlightning as agl
from agentlightning.cli.evaluate import Served, measure, resolve
from agentlightning.trainer.example import load_example

WORDINGS = {
    "as it ships": None,
    "each for every": "Answer the question. Use the calc tool for each operation.",
    "one more sentence": "Answer the question. Use the calc tool for every operation. Then say the result.",
    "no tool named": "Answer the question.",
}


@dataclass(frozen=True)
class Compared:
    served: Served
    prompt: str


def agent_with(prompt: str) -> agl.LitAgent[Any]:
    calc = load_example("calc", "calc_agent")

    @agl.rollout
    async def worded(task: dict[str, Any], llm: agl.LLM) -> float:
        chat = calc.client.with_options(base_url=llm.endpoint, api_key=llm.api_key).chat.completions
        messages: list[Any] = [{"role": "system", "content": prompt}, {"role": "user", "content": task["question"]}]
        for _ in range(calc.MAX_TURNS):
            answer = await chat.create(model=llm.model, messages=messages, tools=[calc.CALC_TOOL], max_tokens=64)
            message = answer.choices[0].message
            if not message.tool_calls:
                return calc.score(message.content or "", task["answer"])
            messages.append(message)
            for call in message.tool_calls:
                result = calc.calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return 0.0

    return worded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--tasks", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="ten tasks once")
    parser.add_argument("--json", action="store_true", help="end with the figures as one line of JSON")
    arguments = parser.parse_args()
    count, repeats = (10, 1) if arguments.quick else (arguments.tasks, arguments.repeats)
    tasks = load_example("calc", "recipe").test_tasks()[:count]
    own = load_example("calc", "calc_agent").SYSTEM_PROMPT
    compared = {name: Compared(Served("calc"), prompt or own) for name, prompt in WORDINGS.items()}
    for run in arguments.runs:
        compared[run.name] = Compared(resolve(run)[0], own)
    found: dict[tuple[str, bool], list[float]] = {}
    for (number, (name, one)), alike in itertools.product(enumerate(compared.items()), (True, False)):
        seed = 0 if alike else 1 + number
        found[name, alike] = measure(one.served, agent_with(one.prompt), tasks, repeats, seed=seed).rewards
    table, figures = Table("", "", "mean rewards", "common seeds", "independent", "ratio"), []
    for first, second in itertools.combinations(compared, 2):
        of_both = [_variance(found[first, alike], found[second, alike]) for alike in (True, False)]
        means = [statistics.fmean(found[name, True]) for name in (first, second)]
        ratio = of_both[0] / of_both[1] if of_both[1] else float("nan")
        figures.append({"first": first, "second": second, "means": means, "variances": of_both, "ratio": ratio})
        table.add_row(first, second, "{:.2f}, {:.2f}".format(*means), *(f"{v:.3f}" for v in of_both), f"{ratio:.2f}")
    Console().print(table)
    if arguments.json:
        print(json.dumps(figures))


def _variance(first: list[float], second: list[float]) -> float:
    return statistics.variance(a - b for a, b in zip(first, second, strict=True))


if __name__ == "__main__":
    main()
