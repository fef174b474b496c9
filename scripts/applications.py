"""Trains examples with several seeds, and writes what came of it into the documentation.

    python -m scripts.applications rag sql --seeds 0 1 2      trains, measures, keeps the results
    python -m scripts.applications --write                    puts the tables into the pages

Each seed is `agl demo NAME --seed S` and then `agl eval RUN` on the held-out tasks that the example brings. Results are
kept in docs/assets/applications.jsonl, a line for each example and seed; a line that is there is not measured again
without `--again`. The tables stand in the pages between `<!-- applications: NAME -->` and `<!-- /applications -->`.
The curve of the first seed is drawn into docs/assets.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from agentlightning.metrics import read_metrics
from scripts.curve import draw

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "assets" / "applications.jsonl"
PAGES = [ROOT / "docs" / "applications.md", *sorted(ROOT.glob("examples/*/README.md"))]
MARKS = re.compile(r"(<!-- applications: (\w+) -->\n).*?(<!-- /applications -->)", re.DOTALL)
FEW = 4
"""Steps at the beginning and at the end that the parts of the reward are averaged over."""

Result = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="examples to train")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--again", action="store_true", help="measure what has been measured before")
    parser.add_argument("--write", action="store_true", help="put the tables into the pages")
    given = parser.parse_args()
    for name in given.names:
        for seed in given.seeds:
            if given.again or not any((r["name"], r["seed"]) == (name, seed) for r in read_results()):
                keep(measured(name, seed))
    if given.write:
        for page in PAGES:
            page.write_text(with_tables(page.read_text(), read_results()))


def measured(name: str, seed: int) -> Result:
    """One run of the demo, and its evaluation."""
    with TemporaryDirectory(prefix="agl-applications-") as folder:
        run = Path(folder) / "run"
        agl("demo", name, "--seed", str(seed), "--run-dir", str(run))
        found = json.loads(agl("eval", str(run), "--json", out=subprocess.PIPE))
        metrics = read_metrics(run / "metrics.jsonl")
        if seed == 0:
            draw(run, ROOT / "docs" / "assets" / f"{name}-curve.svg")
    return {"name": name, "seed": seed, **summary(metrics), "eval": found["estimates"]["mean reward"]}


def agl(*arguments: str, out: int | None = None) -> str:
    command = [sys.executable, "-m", "agentlightning", *arguments]
    return subprocess.run(command, check=True, stdout=out, text=True).stdout


def summary(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a run's metrics say: its length, its failures, and each part of the reward at first and at last."""
    steps = [row for row in metrics if "rollouts" in row]
    names = sorted({name for row in steps for name in row if name.startswith("reward/")})
    parts = {name: [_mean(steps[:FEW], name), _mean(steps[-FEW:], name)] for name in names}
    return {
        "steps": steps[-1]["step"],
        "seconds": round(metrics[-1]["time"] - steps[0]["sampling_from"]),
        "rollouts": sum(row["rollouts"] for row in steps),
        "failed": sum(row["failed"] for row in steps),
        "parts": parts,
    }


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    found = [row[name] for row in rows if row.get(name) is not None]
    return round(fmean(found), 4) if found else None


def read_results() -> list[Result]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def keep(result: Result) -> None:
    """In place of an older one of the same example and seed."""
    key = (result["name"], result["seed"])
    others = [r for r in read_results() if (r["name"], r["seed"]) != key]
    lines = sorted([*others, result], key=lambda r: (r["name"], r["seed"]))
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))


def with_tables(page: str, results: Sequence[Result]) -> str:
    """The page with its tables as the results are; a table without results stays empty."""
    return MARKS.sub(lambda m: m[1] + tables([r for r in results if r["name"] == m[2]]) + m[3], page)


def tables(results: Sequence[Result]) -> str:
    """Reward before and after for each seed, and the parts of the reward over all seeds."""
    if not results:
        return ""
    tasks, steps = results[0]["eval"]["base"]["tasks"], results[0]["steps"]
    head = f"| seed | {tasks} held-out tasks before (95 % interval) | after {steps} steps | gain on the same tasks "
    lines = [head + "| training | failed rollouts |", "|---|---|---|---|---|---|"]
    for r in results:
        before, after, gain = (r["eval"][name] for name in ("base", "trained", "gain"))
        least_and_most = f"{gain['low']:+.3f} to {gain['high']:+.3f}"
        lines.append(
            f"| {r['seed']} | {_interval(before)} | {_interval(after)} | **{gain['value']:+.3f}** ({least_and_most}) "
            f"| {r['seconds'] / 60:.1f} min | {r['failed']} of {r['rollouts']:,} |"
        )
    names = [name for name in results[0]["parts"] if None not in results[0]["parts"][name]]
    if names:
        lines += ["", f"| in training, mean of the seeds | first {FEW} steps | last {FEW} steps |", "|---|---|---|"]
    for name in names:
        first, last = (fmean(r["parts"][name][at] for r in results) for at in (0, 1))
        lines.append(f"| `{name}` | {first:.2f} | {last:.2f} |")
    return "\n".join(lines) + "\n"


def _interval(found: Mapping[str, float]) -> str:
    return f"{found['value']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


if __name__ == "__main__":
    main()
