"""Every algorithm and every way of credit on the calculator agent, for the same number of rollouts.

    python benchmarks/algorithms.py [--steps 30] [--seeds 5] [--only GRPO,RLOO] [--quick] [--json] [--plot FILE.png]
                                    [--tasks calculator,bidding] [--minutes 60]
                                    [--results FILE.jsonl] [--docs docs/algorithms.md] [--jobs 2]

It takes hours; with `--results` every run is written down when it ends, and one that is there already is not run again,
so it can be interrupted and resumed. Seed by seed: with `--minutes` no further run begins after so long, and tables are
of what is there. `--docs` puts them into the page. `--jobs` runs go on at the same time, each on a little more than one
core.

Each run is a fresh process that trains the shipped model on the recipe of `agl demo calc` with fewer and smaller steps
(30 of 32 rollouts: long enough for a verdict on the reward, see scripts/record_runs.py), and validates on the same
held-out tasks before and after; then the same on the game of `examples/bidding`, of several turns with a graded reward.
Below it, a task with intermediate rewards: an agent answers eight questions one after the other and is rewarded for
each. They have nothing to do with each other, so giving a call the rewards of other questions is nothing but noise.
Last, `examples/two_policies`: two adapters with opposite rewards.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentlightning.metrics import read_metrics

FAMILY = {
    "MaxRL": "GRPO(advantage='maxrl')",
    "pass@4": "GRPO(advantage='pass@4')",
    "GRPO dppo_tv": "GRPO(loss='dppo_tv', minibatches=4)",
    "GRPO gmpo": "GRPO(loss='gmpo', clip_low=0.4, clip_high=0.4, minibatches=4)",
    "GRPO sapo": "GRPO(loss='sapo', minibatches=4)",
    "GRPO": "GRPO()",
    "REINFORCE": "REINFORCE()",
    "RLOO": "RLOO()",
    "ReinforcePP": "ReinforcePP()",
    "ReinforcePPBaseline": "ReinforcePPBaseline()",
    "DrGRPO": "DrGRPO()",
    "DAPO": "DAPO()",
    "GSPO": "GSPO()",
    "CISPO": "CISPO()",
    "PPO": "PPO()",
    "GRPO default rate": "GRPO(learning_rate=None)",
    "PPO default rate": "PPO(learning_rate=None)",
    "SFT": "SFT()",
    "DPO": "DPO()",
    "GRPO return_to_go": "GRPO(credit='return_to_go')",
    "GRPO per_turn": "GRPO(credit='per_turn')",
    "GRPO KL 0.01": "GRPO(kl_coef=0.01)",
    "GRPO one step ahead": "GRPO(max_staleness=1)",
    "GRPO two steps ahead": "GRPO(max_staleness=2)",
    "GRPO replay 2": "GRPO(replay=2)",
    "GRPO top_p 0.9, replayed": "GRPO(top_p=0.9, filter_replay=True)",
}
HINTED = {"SelfDistill": "SelfDistill()"}
"""Where tasks have a hint."""
COMPARED = ("GRPO", "REINFORCE", "RLOO", "ReinforcePP", "ReinforcePPBaseline", "DrGRPO")
AHEAD = "GRPO one step ahead"
QUESTIONS = {
    "broadcast of the sum": "GRPO(rollout_return='sum')",
    "return_to_go": "GRPO(credit='return_to_go')",
    "return_to_go gamma 0": "GRPO(credit='return_to_go', gamma=0.0)",
}

TEAM = "two policies"
ON_THE_GAME = ", bidding"
TASKS = {"calculator": {**FAMILY, **HINTED}, "bidding": FAMILY, "eight questions": QUESTIONS}

WORKER = """
import json, re, sys
import agentlightning as agl
from agentlightning.trainer.example import example_dir, load_example
from agentlightning.metrics import SilentConsole

GAME = {"tasks_per_step": 4, "group_size": 8, "learning_rate": 1e-3, "max_context": 256, "val_repeats": 4}
recipe, calc = load_example("calc", "recipe"), load_example("calc", "calc_agent")
given = json.loads(sys.argv[1])


@agl.rollout
async def questions(task, llm, rollout):
    '''Eight questions of one operation, each rewarded when the tool was called; the mean is validated.'''
    chat = calc.client.with_options(base_url=llm.endpoint, api_key=llm.api_key).chat.completions
    rewards = []
    for one in task:
        messages = [
            {"role": "system", "content": calc.SYSTEM_PROMPT},
            {"role": "user", "content": one["question"]},
        ]
        response = await chat.create(model=llm.model, messages=messages, tools=[calc.CALC_TOOL], max_tokens=64)
        calls = response.choices[0].message.tool_calls or []
        rewards.append(float(str(one["answer"]) in [calc.calculate(c.function.arguments) for c in calls]))
        if rollout.mode == agl.RolloutMode.TRAIN:
            agl.emit_reward(rewards[-1])
    return None if rollout.mode == agl.RolloutMode.TRAIN else sum(rewards) / len(rewards)


CALC = {**recipe.SETTINGS, "tasks_per_step": 4}
settings = {**CALC, "steps": given["steps"], "val_every": 1000, "save_every": 1000, "seed": given["seed"]}
if given["task"] == "eight questions":
    settings |= {"tasks_per_step": 4, "group_size": 6, "minibatches": 1, "val_every": 4}
elif given["task"] == "bidding":
    game = load_example("bidding", "game")
    settings = {**GAME, "steps": given["steps"], "seed": given["seed"], "val_every": 1000, "save_every": 1000}
elif given["task"] == "two policies":
    team = load_example("two_policies", "team")
    settings = {**team.SETTINGS, "steps": given["steps"], "seed": given["seed"]}
name, _, arguments = given["algorithm"].partition("(")
own = eval("dict(" + arguments)
model = str(example_dir("bidding", "game") / "model") if given["task"] == "bidding" else "calc"
algorithm = getattr(agl, name)(**{"model": model, **settings, **own})
agent, train, val = calc.calc_agent, recipe.train_tasks(), recipe.val_tasks()
train = [{**task, "hint": f"The answer is {task['answer']}."} for task in train]
if given["task"] == "two policies":
    agent, val = team.team, None
elif given["task"] == "bidding":
    agent = load_example("bidding", "bidding_agent").bidder
    train, val = game.make_tasks()
elif given["task"] == "eight questions":
    tasks = [t for t in train + val if len(re.findall(r"[0-9]+", t["question"])) == 2]
    sets = [tasks[i : i + 8] for i in range(0, len(tasks) - 7, 8)]
    agent, train, val = questions, sets[:-25], sets[-25:]
agl.Trainer(algorithm=algorithm, run_dir="run", concurrency=96, console=SilentConsole()).fit(agent, train, val)
"""


def run(algorithm: str, steps: int, seed: int, *, task: str = "calculator") -> list[dict[str, Any]]:
    """One training run in a process of its own; its metrics."""
    given = json.dumps({"algorithm": algorithm, "steps": steps, "seed": seed, "task": task})
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", WORKER, given],
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{algorithm} failed:\n{done.stderr[-3000:]}")
        return read_metrics(Path(folder) / "run" / "metrics.jsonl")


class Results:
    """Runs that are done, in a file of JSON lines if there is one: a run is known by what it was asked to do."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._done: dict[str, list[dict[str, Any]]] = {}
        self._writing = threading.Lock()
        if file is not None and file.is_file():
            for line in file.read_text().splitlines():
                one = json.loads(line)
                self._done[json.dumps(one["asked"])] = one["rows"]

    def has(self, algorithm: str, steps: int, seed: int, *, task: str) -> bool:
        """Whether the run is done already."""
        return json.dumps({"algorithm": algorithm, "steps": steps, "seed": seed, "task": task}) in self._done

    def run(self, algorithm: str, steps: int, seed: int, *, task: str) -> list[dict[str, Any]]:
        """The metrics of the run, from the file or from a run of now."""
        asked = {"algorithm": algorithm, "steps": steps, "seed": seed, "task": task}
        key = json.dumps(asked)
        if key not in self._done:
            rows = [{k: _short(v) for k, v in row.items() if k in KEPT} for row in run(**asked)]
            self._done[key] = rows
            if self._file is not None:
                with self._writing, self._file.open("a") as opened:
                    opened.write(json.dumps({"asked": asked, "rows": rows}) + "\n")
        return self._done[key]


KEPT = (
    *("step", "reward", "val_reward", "rollouts"),
    *("sampling_from", "sampling_seconds", "learning_from", "learning_seconds"),
    *("updates", "learning_rate", "entropy", "clip_fraction", "kl_old", "grad_norm", "loss", "logprob_gap_max"),
    *("sync_gap", "halvings", "correction_mean", "corrected_to_zero", "effective_sample_size", "explained_variance"),
)
"""What tables and pictures need of a run's metrics, and the verdicts that scripts/record_runs.py keeps runs for."""


def _short(value: Any) -> Any:
    """Four digits; times have all of theirs."""
    return float(f"{value:.4g}") if isinstance(value, float) and abs(value) < 1e6 else value


def summary(runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Means over the seeds; `interval` is the 95 % interval of `after` by Student's t, None for one seed."""

    def mean_of(values: list[float]) -> float:
        return statistics.mean(values)

    trained = [[m for m in rows if "reward" in m] for rows in runs]  # without the validation before the first step
    after = [rows[-1]["val_reward"] for rows in runs]
    half = STUDENT[len(after)] * statistics.stdev(after) / len(after) ** 0.5 if len(after) in STUDENT else None
    return {
        "before": mean_of([rows[0]["val_reward"] for rows in runs]),
        "after": mean_of(after),
        "interval": None if half is None else (mean_of(after) - half, mean_of(after) + half),
        "seeds": len(runs),
        "last_steps": mean_of([mean_of([m["reward"] for m in rows[-4:]]) for rows in trained]),
        "area": mean_of([mean_of([m["reward"] for m in rows]) for rows in trained]),
        "val_mean": mean_of([mean_of([m["val_reward"] for m in rows[1:] if "val_reward" in m]) for rows in runs]),
        "rollouts": mean_of([sum(m["rollouts"] for m in rows) for rows in trained]),
    }


STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""The 97.5 % quantile of Student's t by number of seeds."""


def documented(figures: dict[str, Any], steps: int) -> str:
    """The figures as a table for the documentation, one for each of the two tasks."""
    game = {name: f for name, f in figures.items() if name.endswith(ON_THE_GAME)}
    if game and len(game) < len(figures):
        others = {name: f for name, f in figures.items() if name not in game}
        return f"{documented(others, steps)}\n\nThe bidding game: {documented(game, steps)}"
    titles = ("algorithm", "seeds", "before", "after", "95 % interval", "mean training reward", "rollouts")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, f in figures.items():
        if name == TEAM:
            continue
        interval = "" if f["interval"] is None else f"{f['interval'][0]:.2f} to {min(f['interval'][1], 1.0):.2f}"
        cells = (
            f"`{name.removesuffix(ON_THE_GAME)}`",
            f["seeds"],
            f"{f['before']:.2f}",
            f"{f['after']:.2f}",
            interval,
            f"{f['area']:.2f}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} | {f['rollouts']:,.0f} |")
    return "\n".join([f"{steps} steps.", "", *lines])


def write_into(page: Path, table: str) -> None:
    """Put the table between the page's marks."""
    before, rest = page.read_text().split("<!-- measured -->\n")
    _, after = rest.split("<!-- /measured -->")
    page.write_text(f"{before}<!-- measured -->\n{table}\n<!-- /measured -->{after}")


def team_summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name in ("solver", "sceptic"):
        rewards = [m[f"{name}/reward"] for m in rows if f"{name}/reward" in m]
        found[name] = {"first": statistics.mean(rewards[:2]), "last": statistics.mean(rewards[-2:])}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", help="algorithms, separated by commas")
    parser.add_argument("--tasks", default=",".join(TASKS), help="tasks, separated by commas")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--quick", action="store_true", help="three algorithms, three steps")
    parser.add_argument("--json", action="store_true", help="end with the figures as one line of JSON")
    parser.add_argument("--plot", type=Path, help="draw the learning curves into this file")
    parser.add_argument("--results", type=Path, help="write runs into this file, and take those that are there")
    parser.add_argument("--docs", type=Path, help="put the table into this page, between its marks")
    parser.add_argument("--timeline", type=Path, help="draw when the run one step ahead sampled and learned")
    arguments = parser.parse_args()
    wanted = set((arguments.only or "").split(",")) - {""}
    if arguments.quick:
        wanted, arguments.steps, arguments.seeds = {"GRPO", "RLOO", "PPO"}, 3, 1
    console, results = Console(), Results(arguments.results)
    figures: dict[str, Any] = {}
    curves: dict[str, list[list[dict[str, Any]]]] = {}
    until = time.monotonic() + 60 * arguments.minutes
    tables = {task: table for task, table in TASKS.items() if task in arguments.tasks.split(",")}
    asked = [
        (task, name, algorithm, seed)
        for seed in range(arguments.seeds)
        for task, table in tables.items()
        for name, algorithm in table.items()
        if not wanted or name in wanted
    ]

    def rows_of(one: tuple[str, str, str, int]) -> list[dict[str, Any]] | None:
        task, name, algorithm, seed = one
        if not results.has(algorithm, arguments.steps, seed, task=task) and time.monotonic() > until:
            return None
        rows = results.run(algorithm, arguments.steps, seed, task=task)
        console.print(f"{task}, {name}, seed {seed}: {rows[0]['val_reward']:.3f} → {rows[-1]['val_reward']:.3f}")
        return rows

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for (task, name, _, _), rows in zip(asked, pool.map(rows_of, asked), strict=True):
            if rows is not None:
                curves.setdefault(name if task != "bidding" else f"{name}{ON_THE_GAME}", []).append(rows)
    figures |= {name: summary(runs) for name, runs in curves.items()}
    if figures:
        console.print(_table(figures, arguments.steps))
    if TEAM in wanted or (not wanted and "calculator" in tables and time.monotonic() < until):
        figures[TEAM] = team_summary(run("GRPO()", arguments.steps, 0, task=TEAM))
        console.print(_team_table(figures[TEAM]))
    if arguments.docs:
        write_into(arguments.docs, documented(figures, arguments.steps))
    if arguments.plot:
        plot(curves, arguments.plot)
    if arguments.timeline and AHEAD in curves:
        timeline(curves[AHEAD][0], arguments.timeline)
    if arguments.json:
        print(json.dumps(figures))


def _table(figures: dict[str, Any], steps: int) -> Table:
    shown = Table(title=f"{steps} steps")
    for title in (
        "algorithm",
        "val before",
        "val after",
        "mean of last 4 steps",
        "mean of all steps",
        "mean of val",
        "rollouts",
    ):
        shown.add_column(title, justify="left" if title == "algorithm" else "right")
    for name, f in figures.items():
        values = (f["before"], f["after"], f["val_mean"], f["last_steps"], f["area"])
        shown.add_row(name, *(f"{v:.3f}" for v in values), f"{f['rollouts']:.0f}")
    return shown


def _team_table(figures: dict[str, dict[str, float]]) -> Table:
    shown = Table(title="Two policies with opposite rewards on one base")
    for title in ("policy", "first 2 steps", "last 2 steps"):
        shown.add_column(title, justify="left" if title == "policy" else "right")
    for name, f in figures.items():
        shown.add_row(name, f"{f['first']:.3f}", f"{f['last']:.3f}")
    return shown


def plot(curves: dict[str, list[list[dict[str, Any]]]], picture: Path) -> None:
    """Mean training reward on the calculator (of three steps each), a line per algorithm, GRPO in every panel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = {name: runs for name, runs in curves.items() if name not in QUESTIONS and not name.endswith(ON_THE_GAME)}
    panels = {
        "compared with siblings": [n for n in shown if n in COMPARED],
        "other losses": [n for n in shown if n not in COMPARED and " " not in n],
        "credit, KL, sampling ahead": [n for n in shown if " " in n],
    }
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(1, len(panels), sharey=True)
    for axes, (title, names) in zip(rows, panels.items(), strict=True):
        for name in dict.fromkeys(["GRPO", *names]):
            if name in shown:
                rewards = _smooth([[m["reward"] for m in run if "reward" in m] for run in shown[name]])
                style = {"color": "0.2", "linewidth": 2.5} if name == "GRPO" else {"linewidth": 1.5}
                axes.plot(range(2, len(rewards) + 2), rewards, label=name.removeprefix("GRPO ") or name, **style)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small", loc="lower right")
    rows[0].set(ylabel="mean reward, three steps together")
    figure.savefig(picture, dpi=110)


def _smooth(runs: list[list[float]]) -> list[float]:
    means = [statistics.mean(values) for values in zip(*runs, strict=False)]
    return [statistics.mean(means[i - 1 : i + 2]) for i in range(1, len(means) - 1)]


def timeline(rows: list[dict[str, Any]], picture: Path) -> None:
    """A bar for each step's sampling and one for its learning, over seconds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [m for m in rows if "sampling_from" in m][:10]
    start = steps[0]["sampling_from"]
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for m in steps:
        for row, (name, color) in enumerate((("sampling", "#9db4c0"), ("learning", "#b23a48"))):
            left, width = m[f"{name}_from"] - start, m[f"{name}_seconds"]
            axes.barh(row, width, left=left, color=color, edgecolor="white")
            axes.text(left + width / 2, row, m["step"], ha="center", va="center", fontsize=8)
    axes.set(yticks=[0, 1], yticklabels=["sampling", "learning"], xlabel="seconds; the numbers are steps")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main()
